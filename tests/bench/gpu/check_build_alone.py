"""build.sh names every file that tidepool-gpubench needs, and none of them includes a header that a host with CUDA alone does not have. With `--build` everything but CUDA is built and
run as well."""
import os, re, shlex, subprocess, sys, tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, '..', '..', '..'))
BUILD = os.path.join(HERE, 'build.sh')
FOREIGN = re.compile(r'^/.*/(sodium|xxhash|zmq|oniguruma|utf8proc|jansson)\.h$|/(event2|protobuf-c|criterion)/')


def check_headers():
    with tempfile.TemporaryDirectory() as out:
        commands = subprocess.run([BUILD, out], cwd=ROOT, env=dict(os.environ, LIST='on'), capture_output=True, text=True, check=True).stdout.splitlines()
    seen = set()
    for command in commands:
        words = shlex.split(command)
        source = words[words.index('-c') + 1]
        if source in seen:
            continue
        seen.add(source)
        run = subprocess.run(words[:words.index('-c')] + ['-M', source], cwd=ROOT, capture_output=True, text=True)
        if run.returncode:
            sys.exit(f'{source}: {run.stderr}')
        for header in run.stdout.replace('\\\n', ' ').split()[1:]:
            if FOREIGN.search(header):
                sys.exit(f'{source} includes {header}, which a host with CUDA and libc alone does not have')
    for wanted in ('kernels/cpu/attn_decode.c', 'kernels/cpu/cpu_device.c', 'kvstore/pool.c', 'worker/cache/engine.c', 'worker/model/model.c', 'formats/gguf.c', 'tests/simt/ops_test.c'):
        if wanted not in seen:
            sys.exit(f'{wanted} is not built')
    print(f'{len(seen)} files')


def build_and_run():
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([BUILD, out], cwd=ROOT, env=dict(os.environ, CUDA='off'), check=True)
        subprocess.run([os.path.join(out, 'bin', 'tidepool-gpubench'), '--shape', 'smollm2-135m', '--device', 'cpu', '--prefill', '256', '--chunks', '128', '--decode', '1,2',
                        '--decode-context', '256', '--decode-steps', '2', '--budget', '64', '--fetch', '64', '--page-cache', '0,1', '--ops-context', '4096', '--pool-size', '64M'], check=True)


check_headers()
if '--build' in sys.argv:
    build_and_run()
