"""Run by a Python that has the `tokenizers` package: writes tokenizer.json files of many makes into a folder, and beside each what the package itself makes
of a set of texts. Usage: tokenizer_reference.py FOLDER"""
import json
import os
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ('The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs! 12345 67890, 3.14; '
          'Gr\u00fc\u00dfe aus K\u00f6ln. \u4f60\u597d\uff0c\u4e16\u754c\u3002 \u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440. '
          "I'm sure they've seen it's over; he'd said you'll go. def f(x):\n    return x + 1\n\n\tdone ")
PIECES = ['the', 'The', ' quick', 'fox', 'jumps', ' ', '  ', '\n', '\n\n', '\t', '.', ',', '!', "'s", "'re", '12', '3456', '7', '\u00fc', 'u\u0308', '\u00df', '\u4f60', '\u597d', '\u3002', '\u041f\u0440', '\u2581',
          '<s>', '</s>', '<|im_start|>', '<|im_end|>', '<mask>', 'mask', '[X]', ' [X]', '\u00b2', '\u0660', '\u0915\u094d\u0937', '\U0001f600', '\ufb01', '\u0130', '\u00c9', '\u1100\u1161', '\u00a0', '\u3000', '_', '\u203f', '$', '+',
          'caf\u00e9', '\u0301', '\u1e69', '\ufdd0', 'abc', 'ABC', 'aB']


def texts(seed, n=160):
    rng = random.Random(seed)
    return ['', ' ', CORPUS] + [''.join(rng.choice(PIECES) for _ in range(rng.randrange(1, 14))) for _ in range(n)]


def train(pre_tokenizer, normalizer=None, model=None, added=(), byte_level=False, merges_as_text=False):
    t = Tokenizer(models.BPE(**(model or {})))
    if normalizer: t.normalizer = normalizer
    if pre_tokenizer: t.pre_tokenizer = pre_tokenizer
    special = ['<unk>', '<s>', '</s>'] + ['<0x%02X>' % b for b in range(256) if (model or {}).get('byte_fallback')]
    t.train_from_iterator([CORPUS] * 3, trainers.BpeTrainer(vocab_size=len(special) + (500 if byte_level else 260), special_tokens=special, show_progress=False,
                          initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if byte_level else ['\u2581', ' ']))
    for token in added: t.add_tokens([token]) if not token.special else t.add_special_tokens([token])
    return t


def byte_level(steps, **kw):
    t = train(pre_tokenizers.Sequence(steps + [pre_tokenizers.ByteLevel(add_prefix_space=kw.pop('prefix', False), use_regex=kw.pop('regex', False))]), byte_level=True, **kw)
    t.decoder = decoders.ByteLevel()
    return t


def metaspace(normalizer=None, decoder=None, **kw):
    t = train(pre_tokenizers.Metaspace(**kw.pop('meta', {})), normalizer=normalizer, **kw)
    t.decoder = decoder or decoders.Metaspace()
    return t


def makes():
    P = pre_tokenizers
    N = normalizers
    chat = [AddedToken('<|im_start|>', special=True, normalized=False), AddedToken('<|im_end|>', special=True, normalized=False)]
    yield 'gpt2', byte_level([], regex=True)
    yield 'gpt2_prefix', byte_level([], regex=True, prefix=True)
    yield 'gpt2_added', byte_level([], regex=True, added=chat + [AddedToken('<mask>', lstrip=True, normalized=False), AddedToken('[X]', rstrip=True), AddedToken('abc', single_word=True), AddedToken('\n\n', normalized=False)])
    for behavior in ['removed', 'isolated', 'merged_with_previous', 'merged_with_next', 'contiguous']:
        yield 'split_regex_' + behavior, byte_level([P.Split(Regex(r'\s+|\d'), behavior)])
        yield 'split_invert_' + behavior, byte_level([P.Split(Regex(r'\w+'), behavior, True)])
        yield 'split_string_' + behavior, byte_level([P.Split('o', behavior)])
        yield 'split_empty_' + behavior, byte_level([P.Split(Regex(r'x*'), behavior)])
        yield 'punctuation_' + behavior, byte_level([P.Punctuation(behavior)])
    yield 'digits', byte_level([P.Digits(False)])
    yield 'digits_individual', byte_level([P.Digits(True)], regex=True)
    yield 'whitespace', byte_level([P.Whitespace()])
    yield 'whitespace_split', byte_level([P.WhitespaceSplit()], prefix=True)
    falcon = train(P.Sequence([P.Punctuation('contiguous'), P.ByteLevel(add_prefix_space=False), P.Digits(False), P.Split(Regex('[0-9][0-9][0-9]'), 'isolated')]), byte_level=True)
    falcon.decoder = decoders.ByteLevel()
    yield 'byte_level_in_the_middle', falcon
    for name, normalizer in [('nfc', N.NFC()), ('nfd', N.NFD()), ('nfkc', N.NFKC()), ('nfkd', N.NFKD()), ('lower', N.Lowercase()), ('accents', N.Sequence([N.NFD(), N.StripAccents()])),
                             ('replace', N.Replace('o', '00')), ('replace_regex', N.Replace(Regex(r'\s+'), ' ')), ('strip', N.Strip()), ('strip_left', N.Strip(True, False)),
                             ('prepend', N.Prepend('\u2581'))]:
        yield 'normalizer_' + name, byte_level([], regex=True, normalizer=normalizer, added=[AddedToken('<mask>'), AddedToken('[X]', normalized=False), AddedToken('\u1e69', normalized=True)])
    for scheme in ['always', 'first', 'never']:
        for cut in [True, False]:
            for fuse in [True, False]:
                yield 'metaspace_%s_%d_%d' % (scheme, cut, fuse), metaspace(meta=dict(prepend_scheme=scheme, split=cut), decoder=decoders.Metaspace(prepend_scheme=scheme),
                                                                           model=dict(unk_token='<unk>', fuse_unk=fuse), added=chat + [AddedToken('[X]')])
    yield 'metaspace_words', train(P.Sequence([P.WhitespaceSplit(), P.Metaspace(prepend_scheme='first')]), model=dict(unk_token='<unk>'))
    llama = train(None, normalizer=N.Sequence([N.Prepend('\u2581'), N.Replace(' ', '\u2581')]), model=dict(unk_token='<unk>', fuse_unk=True, byte_fallback=True), added=chat + [AddedToken('<mask>', normalized=True)])
    llama.decoder = decoders.Sequence([decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    llama.post_processor = processors.TemplateProcessing(single='<s> $A </s>', pair='<s> $A $B', special_tokens=[('<s>', 1), ('</s>', 2)])
    yield 'llama', llama
    yield 'no_unk', train(P.Whitespace(), model={})
    ignore = byte_level([P.Split(Regex(r'\s?\S+'), 'isolated')], added=chat)
    j = json.loads(ignore.to_str())
    j['model']['ignore_merges'] = True
    j['post_processor'] = {'type': 'Sequence', 'processors': [{'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': False, 'use_regex': True},
                           json.loads(processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 1)]).__getstate__())]}
    yield 'ignore_merges', Tokenizer.from_str(json.dumps(j))


def differs_in_encoding(name, text):
    """With ignore_merges the package makes a special token of a piece that spells one, even when told that it is text. Here a user's text stays text."""
    return name == 'ignore_merges' and ('<s>' in text or '</s>' in text)


def differs_in_decoding(name, text):
    """An added token that is normalized comes back in normalized form there and as it is spelled here; and there the Metaspace decoder takes every space out
    of the first token, here those at its start."""
    return name.startswith('normalizer_') or (name == 'llama' and '<mask>' in text) or (name.startswith('metaspace') and text == CORPUS)


def main(folder):
    for i, (name, t) in enumerate(makes()):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        j = json.loads(t.to_str())
        if i % 2:  # the older spelling of merges
            j['model']['merges'] = [' '.join(m) if isinstance(m, list) else m for m in j['model']['merges']]
        with open(os.path.join(folder, name, 'tokenizer.json'), 'w') as f:
            json.dump(j, f, ensure_ascii=bool(i % 3))
        t = Tokenizer.from_str(json.dumps(j))
        cases = []
        for text in texts(i):
            t.encode_special_tokens = False
            special = t.encode(text, add_special_tokens=True).ids
            t.encode_special_tokens = True
            plain = t.encode(text, add_special_tokens=False).ids
            decoded = t.decode(plain, skip_special_tokens=False) if t.decoder else None
            cases.append(dict(text=text, special=special, plain=None if differs_in_encoding(name, text) else plain, decoded=None if differs_in_decoding(name, text) else decoded))
        with open(os.path.join(folder, name, 'cases.json'), 'w') as f:
            json.dump(cases, f)


main(sys.argv[1])
