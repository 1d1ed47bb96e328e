"""Every kind of normalizer, pre-tokenizer, added token, post-processor and decoder against the `tokenizers` package itself: some sixty small tokenizer.json
files, each on 163 texts, through the real `tidepool tokenize`."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

from test_tokenizer_fixtures import compare, decode, encode

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(scope='session')
def reference(tmp_path_factory):
    pytest.importorskip('tokenizers')
    folder = tmp_path_factory.mktemp('reference')
    subprocess.run([sys.executable, HERE / 'tokenizer_reference.py', folder], check=True, timeout=300)
    return folder


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
