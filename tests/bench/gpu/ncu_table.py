"""Nsight Compute's CSV (a line a kernel and metric) as a table: a line a kernel, those that take longest first.

    python3 ncu_table.py ncu.csv [ROWS]
"""
import csv
import re
import sys

COLUMNS = (  # title, metric, scale, format
    ('us', 'gpu__time_duration.sum', 1e-3, '{:.1f}'),
    ('MB of DRAM', 'dram__bytes.sum', 1e-6, '{:.2f}'),
    ('DRAM %', 'dram__throughput.avg.pct_of_peak_sustained_elapsed', 1, '{:.0f}'),
    ('SM %', 'sm__throughput.avg.pct_of_peak_sustained_elapsed', 1, '{:.0f}'),
    ('warps %', 'sm__warps_active.avg.pct_of_peak_sustained_active', 1, '{:.0f}'),
    ('bank conflicts', 'l1tex__data_bank_conflicts_pipe_lsu.sum', 1, '{:.0f}'),
    ('registers', 'launch__registers_per_thread', 1, '{:.0f}'),
    ('waves', 'launch__waves_per_multiprocessor', 1, '{:.2f}'),
)


def kernels(lines):
    """[(name, grid, {metric: value})], in the order of launches. What the tool says besides is skipped."""
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    found = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        launch = found.setdefault(row['ID'], (row['Kernel Name'], row.get('Grid Size', ''), {}))
        try:
            launch[2][row['Metric Name']] = float(row['Metric Value'].replace(',', ''))
        except ValueError:
            continue  # n/a
    return list(found.values())


def short(name):
    """Without return type and arguments."""
    return re.sub(r'^void ', '', re.sub(r'\(.*', '', name))[:40]


def main():
    rows = int(sys.argv[2]) if len(sys.argv) > 2 else 24
    try:
        with open(sys.argv[1], encoding='utf-8', errors='replace') as f:
            launches = kernels(f.read().splitlines())
    except OSError as e:
        sys.exit(f'ncu_table.py: {e}')
    print('| kernel | grid | ' + ' | '.join(title for title, *_ in COLUMNS) + ' |\n' + '|---' * (len(COLUMNS) + 2) + '|')
    for name, grid, metrics in sorted(launches, key=lambda launch: -launch[2].get(COLUMNS[0][1], 0))[:rows]:
        cells = [form.format(metrics[metric] * scale) if metric in metrics else '' for _, metric, scale, form in COLUMNS]
        print(f'| {short(name)} | {grid.strip("()").replace(" ", "")} | ' + ' | '.join(cells) + ' |')
    if not launches:
        sys.exit('ncu_table.py: no kernel in ' + sys.argv[1])


main()
