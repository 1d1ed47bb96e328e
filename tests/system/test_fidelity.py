"""`tidepool bench fidelity --quick` as a user runs it: the real model, a private kvstore, files that say what was measured."""
import json, os, subprocess
import xml.etree.ElementTree as ElementTree
import pytest
from processes import BUILD, MODEL, ROOT

SHARED = os.environ.get('TIDEPOOL_SHARED', os.path.join(ROOT, '..', 'shared'))
NEWS = os.path.join(SHARED, 'data', 'longbench', 'multi_news.jsonl')
HANDBOOK = os.path.join(ROOT, 'deploy', 'demo', 'handbook.txt')
PROGRAM = os.path.join(BUILD, 'bin', 'tidepool')


def bench(*args):
    return subprocess.run([PROGRAM, 'bench', 'fidelity', '--model', MODEL, *args], capture_output=True, text=True, timeout=500)


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
    """News where it is there, else the demo's own document as such a file."""
    if os.path.exists(NEWS):
        return NEWS
    path = tmp_path_factory.mktemp('texts') / 'handbook.jsonl'
    path.write_text(json.dumps({'context': open(HANDBOOK).read()}) + '\n')
    return str(path)


@pytest.fixture(scope='module')
def result(texts, tmp_path_factory):
    out = tmp_path_factory.mktemp('fidelity')
    run = bench('--quick', '--texts', texts, '--out', str(out), '--budgets', '64', '--context-tokens', '512', '--positions', '24', '--needle-samples', '1',
                '--rows', 'reference/k8v4@,drop/snapkv,demote/snapkv')
    assert run.returncode == 0, run.stderr
    return out, json.load(open(out / 'fidelity.json')), run


def row(result, name):
    return next(r for r in result[1]['rows'] if r['name'] == name)


def test_full_attention_is_itself(result):
    full = row(result, 'reference/full@0+all')
    assert full['kl'] == 0 and full['jsd'] == 0 and full['top1'] == 1
    assert full['attended_tokens'] > 512 and full['bytes_fetched_per_token'] > 0


def test_demoting_is_nearer_than_dropping(result):
    dropped, demoted, coded = row(result, 'drop/snapkv@64+0'), row(result, 'demote/snapkv@64+64'), row(result, 'reference/k8v4@0+all')
    assert 0 < coded['kl'] < demoted['kl'] < dropped['kl']
    assert demoted['recall_all'] > dropped['recall_all']
    assert dropped['bytes_fetched_per_token'] == 0 < demoted['bytes_fetched_per_token'] < coded['bytes_fetched_per_token']
    assert dropped['attended_tokens'] < demoted['attended_tokens'] < coded['attended_tokens']


def test_files_hold_every_row(result):
    out, data, run = result
    text = (out / 'fidelity.md').read_text()
    assert text.count('| snapkv | 64 |') == 2 and '| full | 0 | all |' in text
    for name in ('kl_by_budget', 'kl_by_attended', 'kl_by_scorer', 'kl_by_traffic', 'recall_by_attended'):
        assert ElementTree.parse(out / (name + '.svg')).getroot().tag.endswith('svg')
    assert sorted(os.listdir(out)) == sorted(['fidelity.json', 'fidelity.md', 'kl_by_attended.svg', 'kl_by_budget.svg', 'kl_by_scorer.svg', 'kl_by_traffic.svg', 'recall_by_attended.svg'])
    assert '\r' not in run.stderr, 'no bar without a terminal'


def test_resume_runs_only_what_is_missing(result, texts):
    out, data, _ = result
    before = row(result, 'demote/snapkv@64+64')
    run = bench('--quick', '--texts', texts, '--out', str(out), '--budgets', '64', '--context-tokens', '512', '--positions', '24', '--needle-samples', '1',
                '--rows', 'drop/snapkv,demote/snapkv', '--resume')
    assert run.returncode == 0, run.stderr
    assert 'demote/snapkv' not in run.stderr and 'reference/full' in run.stderr
    again = json.load(open(out / 'fidelity.json'))
    assert next(r for r in again['rows'] if r['name'] == 'demote/snapkv@64+64') == before
    other = bench('--quick', '--texts', texts, '--out', str(out), '--seed', '8', '--resume')
    assert other.returncode == 1 and 'other settings' in other.stderr


def test_questions_of_a_file_take_the_place_of_needles(tmp_path):
    """RULER's lines: recall needs prose, and is left out unless it is asked for. No model of this size finds these values; that is said, not left out."""
    lines = []
    for i in range(2):
        keys = [(f'{i:04x}{j:04x}-50c7', f'{(i + 1) * (j + 7) * 2654435761 % 2**32:08x}-f36c') for j in range(24)]
        text = 'A special magic uuid is hidden within the following text.\n' + '\n'.join(f'One of the special magic uuids for {k} is: {v}.' for k, v in keys)
        question = f'What is the special magic uuid for {keys[9][0]} mentioned in the provided text? The special magic uuid for {keys[9][0]} mentioned in the provided text is'
        lines.append(json.dumps({'index': i, 'input': text + '\n' + question, 'outputs': [keys[9][1]]}))
    texts, out = tmp_path / 'niah.jsonl', tmp_path / 'out'
    texts.write_text('\n'.join(lines) + '\n')
    args = ['--quick', '--texts', str(texts), '--out', str(out), '--budgets', '64', '--context-tokens', '256', '--positions', '8', '--rows', 'drop/snapkv']
    run = bench(*args)
    assert run.returncode == 0, run.stderr
    data = json.load(open(out / 'fidelity.json'))
    text = (out / 'fidelity.md').read_text()
    assert data['settings']['needle_samples'] == 2 and data['settings']['needle_tokens'] > 600
    assert 'Needle: ' in text and 'of the 2 questions' in text or 'questions (of 2)' in text
    assert 'Recall:' not in text and '| recall' not in text
    asked = bench(*args, '--tasks', 'recall')
    assert asked.returncode == 1 and 'too few for the recall' in asked.stderr


def test_wrong_use_is_named(texts, tmp_path):
    for args, text in ((['--rows', 'nosuch'], 'nosuch'), (['--budgets', '12,x'], '--budgets'), (['--tasks', 'kl,foo'], '--tasks')):
        run = bench('--texts', texts, '--out', str(tmp_path), *args)
        assert run.returncode != 0 and text in run.stderr, run.stderr
    listed = bench('--list', '--all')
    assert listed.returncode == 0 and 'demote/snapkv@256+256' in listed.stdout
