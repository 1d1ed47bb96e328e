"""What callers see of sharing: whose prefixes they get, and how much of a conversation they do not wait for again."""
import openai, pytest
from processes import DOCUMENT, Stack, await_true

with open(DOCUMENT) as f:
    TEXT = f.read()
BLOCK, OBSERVED = 128, 32  # tokens; a prefix never covers the last 32 of a prompt
QUESTIONS = ['What is this about?', 'Tell me more about the first pool.', 'And which animals live there?', 'What should a visitor take along?']


def cached(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


def reusable(tokens, prompt):
    """Of `tokens` computed before, those that a prompt of that length starts from."""
    return min(tokens, prompt - OBSERVED) // BLOCK * BLOCK


def test_keys_do_not_share_and_each_finds_its_own():
    with Stack(workers=1, router_args=['--api-key', 'tenant-key-1,tenant-key-2']) as stack:
        def ask(key, **body):
            with openai.OpenAI(base_url=stack.router.url + '/v1', api_key='tenant-key-%d' % key, max_retries=0, timeout=120) as c:
                return cached(c.completions.create(model=c.models.list().data[0].id, prompt=TEXT[:2400], max_tokens=1, extra_body=body))
        assert ask(1) == 0
        hit = ask(1)
        assert hit >= 384
        assert ask(2) == 0, 'another key'
        assert ask(2) == hit
        assert ask(1, cache_salt='mine') == 0, 'a salt of its own'
        assert ask(1, cache_salt='mine') == hit
        assert ask(2, cache_salt='mine') == 0, 'the same salt under another key'
        assert ask(1) == hit


@pytest.fixture(scope='module', params=['off', 'on'])
def conversation(request):
    """Four turns: [(prompt tokens, cached tokens, completion tokens)], and what the last answer is without any cache."""
    with Stack(workers=1, worker_args=['--reuse-generated', request.param]) as stack:
        with openai.OpenAI(base_url=stack.router.url + '/v1', api_key='unused', max_retries=0, timeout=120) as c:
            model, messages, turns = c.models.list().data[0].id, [], []
            for question in QUESTIONS:
                messages.append({'role': 'user', 'content': question if messages else TEXT[:1500] + '\n\n' + question})
                answer = c.chat.completions.create(model=model, messages=messages, max_tokens=200, temperature=0, extra_body={'ignore_eos': True})
                turns.append((answer.usage.prompt_tokens, cached(answer), answer.usage.completion_tokens))
                messages.append({'role': 'assistant', 'content': answer.choices[0].message.content})
            # Nothing is left of answers but what the next prompt may start from: on, at least the last one's (an answer whose text is tokenized otherwise makes a fork).
            prompt, _, completion = turns[-1]
            kept = (prompt + (completion - 1 if request.param == 'on' else 0)) // BLOCK
            index = lambda: stack.router.metric('prefix_index_blocks')
            await_true('%d blocks' % kept, lambda: index() >= kept if request.param == 'on' else index() == kept, 20)
            print('reuse of generated blocks %s: (prompt, cached, completion) tokens by turn: %s' % (request.param, turns))
            return request.param, turns


def test_each_turn_starts_behind_what_the_last_one_computed(conversation):
    reuse, turns = conversation
    assert turns[0][1] == 0
    for (prompt, _, completion), (next_prompt, found, _) in zip(turns, turns[1:]):
        behind_the_question = reusable(prompt, next_prompt)
        # The last token of an answer is never fed, so it is in no block.
        behind_the_answer = reusable(prompt + completion - 1, next_prompt)
        if reuse == 'off':
            assert found == behind_the_question > 0
        else:
            # The answer's text need not be tokenized as it was generated: then it ends there.
            assert behind_the_question <= found <= behind_the_answer
    if reuse == 'on':
        assert any(found > reusable(prompt, next_prompt) for (prompt, _, _), (next_prompt, found, _) in zip(turns, turns[1:]))
