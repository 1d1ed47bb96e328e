"""Every kind of normalizer, pre-tokenizer, added token, post-processor and decoder against the `tokenizers` package itself: some sixty small tokenizer.json
files, each on 163 texts, through the real `tidepool tokenize`."""
import json
import os
import pathlib
import subprocess
import sys
import venv

import pytest

from test_tokenizer_fixtures import compare, decode, encode

HERE = pathlib.Path(__file__).resolve().parent


def python_with_tokenizers(folder):
    """This Python if it has the package, or one in a new virtual environment."""
    if subprocess.run([sys.executable, '-c', 'import tokenizers'], capture_output=True).returncode == 0:
        return sys.executable
    venv.create(folder / 'venv', with_pip=True)
    python = folder / 'venv' / 'bin' / 'python'
    subprocess.run([python, '-m', 'pip', '--quiet', '--disable-pip-version-check', 'install', 'tokenizers'], check=True, timeout=600)
    return python


@pytest.fixture(scope='session')
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp('reference')
    try:
        python = python_with_tokenizers(folder)
    except (subprocess.SubprocessError, OSError) as e:
        pytest.skip(f'the package `tokenizers` cannot be had here: {e}')
    subprocess.run([python, HERE / 'tokenizer_reference.py', folder / 'made'], check=True, timeout=300)
    return folder / 'made'


def test_every_make_equals_the_package(reference):
    names = sorted(os.listdir(reference))
    assert len(names) > 50
    for name in names:
        path = reference / name / 'tokenizer.json'
        cases = json.loads((reference / name / 'cases.json').read_text())
        for field, options in [('special', ['--special', '--add-special']), ('plain', [])]:
            some = [c for c in cases if c[field] is not None]
            texts = [c['text'] for c in some]
            compare([f'{name}: {t}' for t in texts], [c[field] for c in some], encode(path, texts, *options))
        some = [c for c in cases if c['plain'] is not None and c['decoded'] is not None]
        compare([f'{name}: {c["plain"]}' for c in some], [c['decoded'] for c in some], decode(path, [c['plain'] for c in some]))
