"""The official `openai` client against the whole program: router, kvstore, two workers, the real model."""
import json, math, socket, threading
import openai, pytest
from processes import DOCUMENT, await_true

PROMPT = 'Once upon a time, in a small village by the sea,'
FRANCE = [{'role': 'user', 'content': 'What is the capital of France?'}]


@pytest.fixture(scope='module')
def client(stack):
    with openai.OpenAI(base_url=stack.router.url + '/v1', api_key='unused', max_retries=0, timeout=120) as c:
        yield c


@pytest.fixture(scope='module')
def model(client):
    models = list(client.models.list())
    assert len(models) == 1
    assert client.models.retrieve(models[0].id).id == models[0].id
    return models[0].id


# -- answers --

def test_chat(client, model):
    answer = client.chat.completions.create(model=model, messages=FRANCE, max_completion_tokens=24, temperature=0)
    choice = answer.choices[0]
    assert 'Paris' in choice.message.content and choice.message.role == 'assistant'
    assert choice.finish_reason == 'stop'
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id


def test_chat_stream_says_what_the_whole_answer_says(client, model):
    ask = dict(model=model, messages=FRANCE, max_tokens=24, temperature=0)
    whole = client.chat.completions.create(**ask)
    text, reasons, usage, roles = '', [], None, []
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={'include_usage': True}):
        if chunk.choices:
            delta = chunk.choices[0].delta
            text += delta.content or ''
            roles.append(delta.role)
            reasons.append(chunk.choices[0].finish_reason)
        else:
            usage = chunk.usage
    assert text == whole.choices[0].message.content
    assert roles[0] == 'assistant' and set(roles[1:]) == {None}
    assert reasons[-1] == 'stop' and set(reasons[:-1]) == {None}
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_chat_takes_parts_and_the_developer_role(client, model):
    plain = client.chat.completions.create(model=model, max_tokens=8, temperature=0, messages=[
        {'role': 'system', 'content': 'Answer in one word.'}, {'role': 'user', 'content': 'Name a\ncolor.'}])
    parts = client.chat.completions.create(model=model, max_tokens=8, temperature=0, messages=[
        {'role': 'developer', 'content': 'Answer in one word.'},
        {'role': 'user', 'content': [{'type': 'text', 'text': 'Name a'}, {'type': 'text', 'text': 'color.'}]}])
    assert parts.choices[0].message.content == plain.choices[0].message.content
    assert parts.usage.prompt_tokens == plain.usage.prompt_tokens


def test_completions_of_several_prompts(client, model):
    alone = [client.completions.create(model=model, prompt=p, max_tokens=6, temperature=0).choices[0].text for p in (PROMPT, 'The sky is')]
    both = client.completions.create(model=model, prompt=[PROMPT, 'The sky is'], max_tokens=6, temperature=0)
    assert [c.text for c in both.choices] == alone and [c.index for c in both.choices] == [0, 1]
    streamed = ['', '']
    for chunk in client.completions.create(model=model, prompt=[PROMPT, 'The sky is'], max_tokens=6, temperature=0, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == alone


def test_stop_and_max_tokens(client, model):
    full = client.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0)
    assert full.choices[0].finish_reason == 'length' and full.usage.completion_tokens == 24
    text = full.choices[0].text
    stop = text[len(text) // 2:len(text) // 2 + 5]
    cut = client.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop, 'never said'])
    assert cut.choices[0].text == text[:text.index(stop)] and cut.choices[0].finish_reason == 'stop'
    assert cut.usage.completion_tokens < 24


def test_seed_fixes_the_answer(client, model):
    ask = dict(model=model, prompt=PROMPT, max_tokens=16, temperature=1.0)
    one, two, other = (client.completions.create(**ask, seed=s).choices[0].text for s in (11, 11, 12))
    assert one == two != other


def test_n_answers_differ_and_the_first_is_that_of_n_1(client, model):
    ask = dict(model=model, messages=FRANCE, max_tokens=12, temperature=1.2, seed=3)
    three = client.chat.completions.create(**ask, n=3)
    assert [c.index for c in three.choices] == [0, 1, 2]
    assert len({c.message.content for c in three.choices}) > 1
    one = client.chat.completions.create(**ask)
    assert three.choices[0].message.content == one.choices[0].message.content
    assert three.usage.prompt_tokens == one.usage.prompt_tokens


def test_logit_bias_forces(client, model, stack):
    ids = stack.router.ask('/tokenize', prompt=' cat', add_special_tokens=False)['tokens']
    assert len(ids) == 1
    forced = client.completions.create(model=model, prompt='The dog is a', max_tokens=2, temperature=0, logit_bias={str(ids[0]): 100})
    assert forced.choices[0].text == ' cat cat'


def test_chat_logprobs(client, model):
    answer = client.chat.completions.create(model=model, messages=FRANCE, max_tokens=8, temperature=0, logprobs=True, top_logprobs=4)
    content = answer.choices[0].logprobs.content
    assert ''.join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 4 and entry.logprob == entry.top_logprobs[0].logprob
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and sum(math.exp(v) for v in values) <= 1.0001
        assert bytes(entry.bytes).decode() == entry.token


def test_completion_logprobs_with_echo_score_the_prompt(client, model):
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, temperature=0)
    log = answer.choices[0].logprobs
    assert answer.choices[0].text == PROMPT == ''.join(log.tokens)
    assert log.token_logprobs[0] is None and all(v <= 0 for v in log.token_logprobs[1:])
    wrong = client.completions.create(model=model, prompt='Sea the by small a in time a upon once', max_tokens=0, echo=True, logprobs=1)
    mean = lambda l: sum(l.token_logprobs[1:]) / (len(l.token_logprobs) - 1)
    assert mean(log) > mean(wrong.choices[0].logprobs) + 1, 'sense scores better than nonsense'


# -- errors --

def test_errors_name_the_field(client, model):
    for ask, param in [(dict(temperature=3), 'temperature'), (dict(max_tokens=0), 'max_tokens'), (dict(n=1000), 'n'), (dict(logprobs=True, top_logprobs=50), 'top_logprobs'),
                       (dict(stop=['']), 'stop'), (dict(response_format={'type': 'json_object'}), 'response_format'),
                       (dict(tools=[{'type': 'function', 'function': {'name': 'f', 'parameters': {}}}]), 'tools')]:
        with pytest.raises(openai.BadRequestError) as e:
            client.chat.completions.create(model=model, messages=FRANCE, **ask)
        assert e.value.param == param and e.value.type == 'invalid_request_error' and param in e.value.message
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model=model, messages=[{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'http://x/y.png'}}]}])
    assert e.value.param == 'messages[0].content'
    with pytest.raises(openai.NotFoundError) as e:
        client.chat.completions.create(model='gpt-4o', messages=FRANCE)
    assert e.value.code == 'model_not_found'


def test_what_does_not_fit_the_context_is_refused_with_the_numbers(client, model):
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model=model, prompt=[5] * 9000, max_tokens=10)
    assert e.value.code == 'context_length_exceeded' and '9000' in e.value.message and '8192' in e.value.message
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model=model, prompt=PROMPT, max_tokens=100000)
    assert e.value.code == 'context_length_exceeded'


# -- the pool --

def test_a_prefix_comes_from_the_pool_on_whichever_worker(client, model, stack):
    with open(DOCUMENT) as f:
        document = f.read()[:3000]
    ask = lambda question: client.chat.completions.create(model=model, max_tokens=8, temperature=0, messages=[
        {'role': 'user', 'content': document + '\n\n' + question}])
    first = ask('What is this about?')
    assert first.usage.prompt_tokens > 512 and first.usage.prompt_tokens_details.cached_tokens == 0
    blocks = await_true('the blocks in the index', lambda: stack.router.metric('prefix_index_blocks'))
    assert blocks >= 4
    second = ask('Who wrote it?')
    assert second.usage.prompt_tokens_details.cached_tokens >= 256
    costs = [answer.usage.model_extra['tidepool'] for answer in (first, second)]
    assert costs[0]['worker'] != costs[1]['worker'], 'the idle worker takes it'
    assert costs[0]['bytes_loaded'] == 0 and costs[1]['bytes_loaded'] > 0
    again = ask('What is this about?')
    assert again.choices[0].message.content == first.choices[0].message.content, 'from the pool as from cold'
    salted = client.chat.completions.create(model=model, max_tokens=1, messages=[{'role': 'user', 'content': document}], extra_body={'cache_salt': 'mine'})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


# -- many, and leaving --

def test_sixteen_streams_at_once_are_what_each_is_alone(client, model):
    prompts = ['Number %d is' % i for i in range(16)]
    ask = lambda p: dict(model=model, prompt=p, max_tokens=12, temperature=0.7, seed=5)
    alone = [client.completions.create(**ask(p)).choices[0].text for p in prompts[:4]]
    got = [None] * 16

    def read(i):
        got[i] = ''.join(c.choices[0].text for c in client.completions.create(**ask(prompts[i]), stream=True))
    threads = [threading.Thread(target=read, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got[:4] == alone and all(got)


@pytest.mark.parametrize('stream', [True, False])
def test_a_client_that_leaves_stops_its_generation(client, model, stack, stream):
    finished = stack.router.metric('request_success_total', finished_reason='abort')
    if stream:
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=4000, stream=True, extra_body={'ignore_eos': True})
        next(iter(answer))
        answer.close()
    else:
        body = json.dumps({'prompt': PROMPT, 'max_tokens': 4000, 'ignore_eos': True}).encode()
        with socket.create_connection(('127.0.0.1', stack.router.port)) as s:
            s.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n' % len(body) + body)
            await_true('the request to run', lambda: sum(stack.router.metric(n) for n in ('worker_requests_running', 'worker_requests_prefilling')) > 0)
    await_true('the cancellation', lambda: stack.router.metric('request_success_total', finished_reason='abort') == finished + 1, 10)
    await_true('idle workers', lambda: sum(stack.router.metric(n) for n in ('worker_requests_running', 'worker_requests_prefilling', 'worker_requests_waiting',
                                                                            'num_requests_running')) == 0, 10)


def test_metrics_are_prometheus_text(stack):
    status, headers, text = stack.router.request('GET', '/metrics')
    assert status == 200 and headers['Content-Type'].startswith('text/plain; version=0.0.4')
    families = {}
    for line in text.decode().splitlines():
        if line.startswith('# TYPE '):
            _, _, name, kind = line.split()
            assert name not in families, 'a family is announced once'
            families[name] = kind
        elif not line.startswith('#'):
            name = line.split('{')[0].split()[0]
            base = name
            for suffix in '_bucket', '_sum', '_count':
                if families.get(name.removesuffix(suffix)) == 'histogram':
                    base = name.removesuffix(suffix)
            assert base in families, name
            float(line.rsplit(' ', 1)[1])
    for name in ('time_to_first_token_seconds', 'inter_token_latency_seconds', 'e2e_request_latency_seconds', 'request_queue_time_seconds'):
        assert families['tidepool_' + name] == 'histogram'
    assert all(kind == 'counter' for name, kind in families.items() if name.endswith('_total'))
