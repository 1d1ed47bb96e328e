"""on_gpu.sh over the emulated GPU: a group of ops that breaks the device is named and hides no other, a part without time is named, too, and results are files. And the table of counters.

    check_on_gpu.py OPS_TEST
"""
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
COUNTERS = '''==PROF== Connected to process 17
"ID","Process ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit","Metric Value"
"0","17","rmsnorm_kernel(const float *, float)","(256, 1, 1)","(16, 1, 1)","gpu__time_duration.sum","ns","2,500"
"0","17","rmsnorm_kernel(const float *, float)","(256, 1, 1)","(16, 1, 1)","launch__registers_per_thread","register/thread","24"
"1","17","void attn_prefill_kernel<(int)128>(prefill_args)","(128, 1, 1)","(512, 2, 1)","gpu__time_duration.sum","ns","1,000,000"
"1","17","void attn_prefill_kernel<(int)128>(prefill_args)","(128, 1, 1)","(512, 2, 1)","dram__bytes.sum","byte","n/a"
'''


def run(folder, **environment):
    done = subprocess.run([os.path.join(HERE, 'on_gpu.sh'), '--quick', folder], env=dict(os.environ, OUT=os.path.join(folder, 'out'), PARTS='ops', **environment), capture_output=True, text=True)
    return done.returncode, done.stdout


def want(condition, what, text):
    if not condition:
        sys.exit(f'{what}:\n{text}')


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, 'bin'))
        os.symlink(os.path.abspath(sys.argv[1]), os.path.join(folder, 'bin', 'ops_test'))
        status, out = run(folder, GROUPS_WANTED='select|elementwise', SIMT_FAIL_LAUNCH='topk_kernel:1')
        want(status != 0 and 'FAIL select' in out and 'ok   elementwise' in out and 'FAILED: ops' in out, 'a group that breaks the device', out)
        with open(os.path.join(folder, 'out', 'summary.md'), encoding='utf-8') as f:
            want(f.read() == out, 'summary.md is not what stdout had', out)
        status, out = run(folder, DEADLINE='0')
        want(status != 0 and 'no time left for: ops' in out, 'a part without time', out)
        counters = os.path.join(folder, 'ncu.csv')
        with open(counters, 'w', encoding='utf-8') as f:
            f.write(COUNTERS)
        out = subprocess.run([sys.executable, '-B', os.path.join(HERE, 'ncu_table.py'), counters], capture_output=True, text=True, check=True).stdout.splitlines()
        want(out[2].startswith('| attn_prefill_kernel<') and '| 1000.0 |' in out[2] and out[3].startswith('| rmsnorm_kernel | 16,1,1 | 2.5 |'), 'the table of counters', '\n'.join(out))


main()
