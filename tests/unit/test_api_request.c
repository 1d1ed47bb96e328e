/* Bodies of requests: what is taken, and for every field what is refused, with the field's name in the error. */
#include "router/api/api_request.h"
#include "tiny_tokenizer.h"
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct tokenizer *tok;
static struct api_request r;
static struct api_error err;

static void setup(void)
{
    tok = tiny_tokenizer_open();
    memset(&err, 0, sizeof(err));
}

static void teardown(void)
{
    api_request_fini(&r);
    tokenizer_close(tok);
}

TestSuite(api_request, .init = setup, .fini = teardown);

static void parses(enum api_kind kind, const char *body)
{
    cr_assert_eq(api_request_parse(kind, body, strlen(body), tok, &r, &err), 0, "%s: %s", body, err.message);
}

#define MESSAGES "\"messages\":[{\"role\":\"user\",\"content\":\"he\"}]"

Test(api_request, test_api_request_chat_has_the_defaults_of_openai)
{
    parses(API_CHAT, "{" MESSAGES "}");
    cr_assert_str_eq(buf_cstr(&r.messages), "[{\"role\":\"user\",\"content\":\"he\"}]");
    cr_assert_eq(r.max_tokens, -1);
    cr_assert_eq(r.n, 1);
    cr_assert_eq(r.sampling.temperature, 1);
    cr_assert_eq(r.sampling.top_p, 1);
    cr_assert_eq(r.sampling.top_k, 0);
    cr_assert_eq(r.sampling.repetition_penalty, 1);
    cr_assert_not(r.stream);
    cr_assert_not(r.has_seed);
    cr_assert_not(r.add_special_tokens);
    cr_assert(r.add_generation_prompt);
    cr_assert(r.skip_special_tokens);
}

Test(api_request, test_api_request_completion_has_the_defaults_of_openai)
{
    parses(API_COMPLETION, "{\"prompt\":\"he\"}");
    cr_assert_eq(r.max_tokens, 16);
    cr_assert(r.add_special_tokens);
    cr_assert_eq(r.n_prompts, 1);
    cr_assert_str_eq(r.prompts[0].text, "he");
}

Test(api_request, test_api_request_null_counts_as_absent)
{
    parses(API_CHAT, "{" MESSAGES ",\"temperature\":null,\"max_tokens\":null,\"stop\":null,\"seed\":null,\"stream_options\":null,\"logit_bias\":null,"
                     "\"tools\":null,\"response_format\":null,\"n\":null,\"user\":null,\"max_completion_tokens\":null,\"stream\":null,\"top_logprobs\":null}");
    cr_assert_eq(r.sampling.temperature, 1);
    cr_assert_eq(r.max_tokens, -1);
    cr_assert_not(r.has_seed);
}

Test(api_request, test_api_request_takes_every_field)
{
    parses(API_CHAT, "{\"model\":\"m\"," MESSAGES ",\"max_tokens\":7,\"temperature\":0.5,\"top_p\":0.25,\"top_k\":40,\"min_p\":0.125,\"presence_penalty\":-2,"
                     "\"frequency_penalty\":2,\"repetition_penalty\":1.5,\"n\":3,\"seed\":-5,\"stop\":[\"a\",\"b c\"],\"stream\":true,"
                     "\"stream_options\":{\"include_usage\":true,\"x\":1},\"logprobs\":true,\"top_logprobs\":5,\"logit_bias\":{\"3\":-100,\"4\":1.5},"
                     "\"ignore_eos\":true,\"min_tokens\":2,\"stop_token_ids\":[5,6],\"skip_special_tokens\":false,\"include_stop_str_in_output\":true,"
                     "\"add_generation_prompt\":false,\"add_special_tokens\":true,\"cache_salt\":\"s\",\"user\":\"u\",\"return_token_ids\":true}");
    cr_assert_str_eq(r.model, "m");
    cr_assert_eq(r.max_tokens, 7);
    cr_assert_eq(r.sampling.temperature, 0.5f);
    cr_assert_eq(r.sampling.top_p, 0.25f);
    cr_assert_eq(r.sampling.top_k, 40);
    cr_assert_eq(r.sampling.min_p, 0.125f);
    cr_assert_eq(r.sampling.presence_penalty, -2);
    cr_assert_eq(r.sampling.frequency_penalty, 2);
    cr_assert_eq(r.sampling.repetition_penalty, 1.5f);
    cr_assert_eq(r.n, 3);
    cr_assert(r.has_seed);
    cr_assert_eq(r.seed, -5);
    cr_assert_eq(r.n_stops, 2);
    cr_assert_str_eq(r.stops[1].text, "b c");
    cr_assert(r.stream);
    cr_assert(r.include_usage);
    cr_assert(r.sampling.logprobs);
    cr_assert_eq(r.sampling.n_logprobs, 5);
    cr_assert_eq(r.sampling.n_logit_bias, 2);
    cr_assert_eq(r.sampling.logit_bias[1].id, 4);
    cr_assert_eq(r.sampling.logit_bias[1].bias, 1.5f);
    cr_assert(r.ignore_eos);
    cr_assert_eq(r.min_tokens, 2);
    cr_assert_eq(r.n_stop_ids, 2);
    cr_assert_not(r.skip_special_tokens);
    cr_assert(r.include_stop);
    cr_assert_not(r.add_generation_prompt);
    cr_assert(r.add_special_tokens);
    cr_assert_str_eq(buf_cstr(&r.cache_salt), "s");
    cr_assert(r.return_token_ids);
    cr_assert_eq(r.n_unknown, 0);
}

Test(api_request, test_api_request_the_newer_max_tokens_wins_in_either_order)
{
    parses(API_CHAT, "{" MESSAGES ",\"max_tokens\":5,\"max_completion_tokens\":9}");
    cr_assert_eq(r.max_tokens, 9);
    api_request_fini(&r);
    parses(API_CHAT, "{" MESSAGES ",\"max_completion_tokens\":9,\"max_tokens\":5}");
    cr_assert_eq(r.max_tokens, 9);
}

Test(api_request, test_api_request_seeds_keep_all_their_bits)
{
    parses(API_CHAT, "{" MESSAGES ",\"seed\":9007199254740993}");
    cr_assert_eq(r.seed, 9007199254740993ll);
}

Test(api_request, test_api_request_top_k_of_minus_one_is_off_and_top_p_of_zero_is_greedy)
{
    parses(API_CHAT, "{" MESSAGES ",\"top_k\":-1,\"top_p\":0}");
    cr_assert_eq(r.sampling.top_k, 1);
    cr_assert_eq(r.sampling.top_p, 1);
}

Test(api_request, test_api_request_unknown_fields_are_listed_and_ignored)
{
    parses(API_CHAT, "{" MESSAGES ",\"frobnicate\":{\"a\":[1,2]},\"n_predict\":-1}");
    cr_assert_eq(r.n_unknown, 2);
    cr_assert_str_eq(r.unknown[0], "frobnicate");
    cr_assert_str_eq(r.unknown[1], "n_predict");
}

/* -- prompts -- */

Test(api_request, test_api_request_prompt_takes_all_four_shapes)
{
    parses(API_COMPLETION, "{\"prompt\":[\"he\",\"a\"]}");
    cr_assert_eq(r.n_prompts, 2);
    cr_assert_str_eq(r.prompts[1].text, "a");
    api_request_fini(&r);
    parses(API_COMPLETION, "{\"prompt\":[1,2,3]}");
    cr_assert_eq(r.n_prompts, 1);
    cr_assert_eq(r.prompts[0].n_ids, 3);
    cr_assert_eq(r.prompts[0].ids[2], 3);
    api_request_fini(&r);
    parses(API_COMPLETION, "{\"prompt\":[[1],[2,3]]}");
    cr_assert_eq(r.n_prompts, 2);
    cr_assert_eq(r.prompts[1].n_ids, 2);
}

Test(api_request, test_api_request_echo_alone_needs_no_tokens)
{
    parses(API_COMPLETION, "{\"prompt\":\"he\",\"echo\":true,\"max_tokens\":0,\"logprobs\":0}");
    cr_assert_eq(r.max_tokens, 0);
    cr_assert(r.sampling.logprobs);
    cr_assert_eq(r.sampling.n_logprobs, 0);
}

/* -- messages -- */

Test(api_request, test_api_request_developer_becomes_system_and_parts_are_joined)
{
    parses(API_CHAT, "{\"messages\":[{\"content\":\"x\",\"role\":\"developer\"},{\"role\":\"user\",\"name\":\"bob\",\"content\":["
                     "{\"type\":\"text\",\"text\":\"he\"},{\"text\":\"y\",\"type\":\"text\"}]}]}");
    cr_assert_str_eq(buf_cstr(&r.messages),
                     "[{\"role\":\"system\",\"content\":\"x\"},{\"name\":\"bob\",\"role\":\"user\",\"content\":\"he\\ny\"}]");
}

Test(api_request, test_api_request_special_tokens_of_users_are_neutralized)
{
    parses(API_CHAT, "{\"messages\":[{\"role\":\"user\",\"name\":\"<s>\",\"content\":\"<|im_end|>\",\"<s>\":1,\"x\":{\"<|im_end|>\":[{\"<s>\":1}]}}],"
                     "\"chat_template_kwargs\":{\"<s>\":1}}");
    cr_assert_null(strstr(buf_cstr(&r.template_vars), "<s>"));
    cr_assert_null(strstr(buf_cstr(&r.messages), "<|im_end|>"));
    cr_assert_null(strstr(buf_cstr(&r.messages), "<s>"));
    cr_assert(strstr(buf_cstr(&r.messages), "\xef\xb7\x90"), "the mark is there");
}

Test(api_request, test_api_request_assistant_may_have_no_content)
{
    parses(API_CHAT, "{\"messages\":[{\"role\":\"assistant\",\"content\":null},{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"1\"}]}]}");
    cr_assert_str_eq(buf_cstr(&r.messages), "[{\"role\":\"assistant\",\"content\":\"\"},{\"tool_calls\":[{\"id\":\"1\"}],\"role\":\"assistant\",\"content\":null}]");
}

Test(api_request, test_api_request_template_variables_are_gathered)
{
    parses(API_CHAT, "{" MESSAGES ",\"chat_template_kwargs\":{\"enable_thinking\":false,\"x\":[1,{\"y\":null}]},\"documents\":[{\"text\":\"he\"}]}");
    cr_assert_str_eq(buf_cstr(&r.template_vars), "\"enable_thinking\":false,\"x\":[1,{\"y\":null}],\"documents\":[{\"text\":\"he\"}]");
}

Test(api_request, test_api_request_tools_are_taken_when_they_are_switched_off)
{
    parses(API_CHAT, "{" MESSAGES ",\"tools\":[{\"type\":\"function\"}],\"tool_choice\":\"none\"}");
    api_request_fini(&r);
    parses(API_CHAT, "{" MESSAGES ",\"tools\":[],\"tool_choice\":\"auto\",\"parallel_tool_calls\":true}");
}

Test(api_request, test_api_request_harmless_values_of_unsupported_fields_are_taken)
{
    parses(API_CHAT, "{" MESSAGES ",\"response_format\":{\"type\":\"text\"},\"modalities\":[\"text\"],\"functions\":[],\"use_beam_search\":false,"
                     "\"priority\":0,\"prompt_logprobs\":0,\"bad_words\":[ ],\"chat_template\":null,\"echo\":false,\"suffix\":\"\",\"guided_json\":null}");
    cr_assert_eq(r.n_unknown, 0);
}

Test(api_request, test_api_request_tokenize_takes_text_or_messages)
{
    parses(API_TOKENIZE, "{\"prompt\":\"\",\"add_special_tokens\":false,\"parse_special\":false,\"return_token_strs\":true}");
    cr_assert_not(r.add_special_tokens);
    cr_assert_not(r.parse_special);
    cr_assert(r.return_token_strs);
    api_request_fini(&r);
    cr_assert(api_request_has("{\"x\":{\"messages\":1},\"messages\":[]}", 34, "messages"));
    cr_assert_not(api_request_has("{\"x\":{\"messages\":1}}", 20, "messages"));
    cr_assert_not(api_request_has("{\"x\"", 4, "messages"));
    parses(API_TOKENIZE_CHAT, "{" MESSAGES "}");
}

/* -- what is refused -- */

struct refusal {
    enum api_kind kind;
    const char *body;  /* members beside the messages or the prompt; one that begins with { is the whole body */
    const char *param; /* "": none */
    const char *says;
};

#define CHAT(member, param, says) {API_CHAT, member, param, says}
#define COMPLETION(member, param, says) {API_COMPLETION, member, param, says}

static const struct refusal refusals[] = {
    /* the body */
    CHAT("{", "", "at byte 1"),
    CHAT("{} x", "", "at byte 3"),
    CHAT("{\"a\":1,\"a\":2}", "", "duplicate key at byte 7"),
    CHAT("{\"a\":1e999}", "", "at byte 5"),
    CHAT("{\"a\":\"\\ud800\"}", "", "at byte"),
    CHAT("{\"a\":\"\xff\"}", "", "at byte"),
    CHAT("{\"a\":01}", "", "at byte"),
    CHAT("{\"a\":[1,]}", "", "at byte"),
    CHAT("{\"a\":nul}", "", "at byte"),
    CHAT("{}", "messages", "messages is required"),
    {API_COMPLETION, "{}", "prompt", "prompt is required"},
    /* numbers */
    CHAT("\"temperature\":2.5", "temperature", "a number from 0 to 2, not 2.5"),
    CHAT("\"temperature\":-0.1", "temperature", "from 0 to 2"),
    CHAT("\"temperature\":\"1\"", "temperature", "not a string"),
    CHAT("\"top_p\":1.01", "top_p", "from 0 to 1"),
    CHAT("\"top_p\":[]", "top_p", "not an array"),
    CHAT("\"top_k\":-2", "top_k", "an integer from -1"),
    CHAT("\"top_k\":1.5", "top_k", "an integer"),
    CHAT("\"min_p\":2", "min_p", "from 0 to 1"),
    CHAT("\"presence_penalty\":2.1", "presence_penalty", "from -2 to 2"),
    CHAT("\"frequency_penalty\":-3", "frequency_penalty", "from -2 to 2"),
    CHAT("\"repetition_penalty\":0", "repetition_penalty", "from 0.01 to 10"),
    CHAT("\"max_tokens\":0", "max_tokens", "from 1 to"),
    CHAT("\"max_tokens\":-1", "max_tokens", "from 1 to"),
    CHAT("\"max_tokens\":3000000000", "max_tokens", "not 3000000000"),
    CHAT("\"max_tokens\":\"5\"", "max_tokens", "not a string"),
    CHAT("\"max_completion_tokens\":0", "max_completion_tokens", "from 1 to"),
    CHAT("\"max_completion_tokens\":5,\"max_tokens\":\"x\"", "max_tokens", "not a string"),
    CHAT("\"n\":0", "n", "from 1 to 64"),
    CHAT("\"n\":65", "n", "from 1 to 64"),
    CHAT("\"n\":true", "n", "not a boolean"),
    CHAT("\"seed\":1.5", "seed", "an integer"),
    CHAT("\"seed\":9223372036854775808", "seed", "an integer"),
    CHAT("\"min_tokens\":-1", "min_tokens", "from 0"),
    CHAT("\"min_tokens\":9,\"max_tokens\":8", "min_tokens", "at most max_tokens, which is 8"),
    COMPLETION("\"max_tokens\":0", "max_tokens", "at least 1 unless echo"),
    COMPLETION("\"logprobs\":21", "logprobs", "from 0 to 20"),
    COMPLETION("\"logprobs\":true", "logprobs", "not a boolean"),
    COMPLETION("\"best_of\":2", "best_of", "not supported"),
    COMPLETION("\"n\":2,\"best_of\":3", "best_of", "equal to n"),
    /* logprobs of chats */
    CHAT("\"logprobs\":1", "logprobs", "true or false"),
    CHAT("\"top_logprobs\":21,\"logprobs\":true", "top_logprobs", "from 0 to 20"),
    CHAT("\"top_logprobs\":3", "top_logprobs", "needs logprobs"),
    /* booleans */
    CHAT("\"stream\":\"yes\"", "stream", "true or false, not a string"),
    CHAT("\"ignore_eos\":1", "ignore_eos", "true or false"),
    CHAT("\"skip_special_tokens\":0", "skip_special_tokens", "true or false"),
    CHAT("\"include_stop_str_in_output\":{}", "include_stop_str_in_output", "not an object"),
    CHAT("\"add_generation_prompt\":1", "add_generation_prompt", "true or false"),
    CHAT("\"add_special_tokens\":1", "add_special_tokens", "true or false"),
    CHAT("\"return_token_ids\":1", "return_token_ids", "true or false"),
    CHAT("\"continue_final_message\":true,\"add_generation_prompt\":true", "continue_final_message", "cannot both"),
    COMPLETION("\"echo\":1", "echo", "true or false"),
    /* stop */
    CHAT("\"stop\":\"\"", "stop", "1 to 4096 bytes"),
    CHAT("\"stop\":5", "stop", "a string or a list"),
    CHAT("\"stop\":[\"a\",5]", "stop", "not a number"),
    CHAT("\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"10\",\"11\",\"12\",\"13\",\"14\",\"15\",\"16\",\"17\",\"18\",\"19\",\"20\",\"21\",\"22\","
         "\"23\",\"24\",\"25\",\"26\",\"27\",\"28\",\"29\",\"30\",\"31\",\"32\",\"33\"]", "stop", "at most 32"),
    CHAT("\"stop_token_ids\":5", "stop_token_ids", "a list"),
    CHAT("\"stop_token_ids\":[-1]", "stop_token_ids", "from 0 to"),
    CHAT("\"stop_token_ids\":[100000]", "stop_token_ids", "from 0 to"),
    /* logit_bias */
    CHAT("\"logit_bias\":[]", "logit_bias", "an object"),
    CHAT("\"logit_bias\":{\"x\":1}", "logit_bias", "token ids"),
    CHAT("\"logit_bias\":{\"-1\":1}", "logit_bias", "token ids"),
    CHAT("\"logit_bias\":{\"100000\":1}", "logit_bias", "token ids"),
    CHAT("\"logit_bias\":{\"99999999999999999999\":1}", "logit_bias", "token ids"),
    CHAT("\"logit_bias\":{\"3\":101}", "logit_bias", "from -100 to 100"),
    CHAT("\"logit_bias\":{\"3\":\"1\"}", "logit_bias", "not a string"),
    /* streams */
    CHAT("\"stream_options\":{\"include_usage\":true}", "stream_options", "only allowed when stream is true"),
    CHAT("\"stream\":true,\"stream_options\":true", "stream_options", "an object"),
    CHAT("\"stream\":true,\"stream_options\":{\"include_usage\":1}", "stream_options.include_usage", "true or false"),
    /* text fields */
    CHAT("\"model\":5", "model", "a string"),
    CHAT("\"user\":5", "user", "a string"),
    CHAT("\"cache_salt\":\"\"", "cache_salt", "1 to 1024 bytes"),
    CHAT("\"cache_salt\":1", "cache_salt", "a string"),
    /* what would change the answer */
    CHAT("\"tools\":[{\"type\":\"function\"}]", "tools", "does not parse tool calls"),
    CHAT("\"tools\":{}", "tools", "a list"),
    CHAT("\"tool_choice\":\"required\"", "tool_choice", "not supported"),
    CHAT("\"tool_choice\":{\"type\":\"function\"}", "tool_choice", "not supported"),
    CHAT("\"response_format\":{\"type\":\"json_object\"}", "response_format", "not supported"),
    CHAT("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{}}", "response_format", "not supported"),
    CHAT("\"response_format\":\"text\"", "response_format", "not supported"),
    CHAT("\"modalities\":[\"text\",\"audio\"]", "modalities", "not supported"),
    CHAT("\"functions\":[{}]", "functions", "not supported"),
    CHAT("\"guided_json\":{}", "guided_json", "not supported"),
    CHAT("\"structured_outputs\":{}", "structured_outputs", "not supported"),
    CHAT("\"use_beam_search\":true", "use_beam_search", "not supported"),
    CHAT("\"priority\":1", "priority", "not supported"),
    CHAT("\"chat_template\":\"x\"", "chat_template", "--chat-template"),
    CHAT("\"echo\":true", "echo", "/v1/completions"),
    COMPLETION("\"suffix\":\"x\"", "suffix", "not supported"),
    COMPLETION("\"truncate_prompt_tokens\":5", "truncate_prompt_tokens", "not supported"),
    /* messages */
    CHAT("{\"messages\":[]}", "messages", "must not be empty"),
    CHAT("{\"messages\":{}}", "messages", "a list of messages"),
    CHAT("{\"messages\":[5]}", "messages[0]", "an object"),
    CHAT("{\"messages\":[{\"content\":\"x\"}]}", "messages[0].role", "required"),
    CHAT("{\"messages\":[{\"role\":\"user\"}]}", "messages[0].content", "required"),
    CHAT("{\"messages\":[{\"role\":\"user\",\"content\":null}]}", "messages[0].content", "required"),
    CHAT("{\"messages\":[{\"role\":\"robot\",\"content\":\"x\"}]}", "messages[0].role", "not \"robot\""),
    CHAT("{\"messages\":[{\"role\":5,\"content\":\"x\"}]}", "messages[0].role", "a string"),
    CHAT("{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"user\",\"content\":5}]}", "messages[1].content", "not a number"),
    CHAT("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":\"x\"}}]}]}", "messages[0].content", "\"image_url\""),
    CHAT("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}", "messages[0].content", "needs \"text\""),
    CHAT("{\"messages\":[{\"role\":\"user\",\"content\":[5]}]}", "messages[0].content", "not a number"),
    CHAT("\"documents\":5", "documents", "a list"),
    CHAT("\"chat_template_kwargs\":[]", "chat_template_kwargs", "an object"),
    CHAT("\"chat_template_kwargs\":{\"messages\":[]}", "chat_template_kwargs", "may not set messages"),
    CHAT("\"chat_template_kwargs\":{\"x\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}", "chat_template_kwargs", "nested"),
    /* prompts */
    {API_COMPLETION, "{\"prompt\":5}", "prompt", "not a number"},
    {API_COMPLETION, "{\"prompt\":[]}", "prompt", "must not be empty"},
    {API_COMPLETION, "{\"prompt\":[[]]}", "prompt", "empty list"},
    {API_COMPLETION, "{\"prompt\":[\"a\",5]}", "prompt", "not a number"},
    {API_COMPLETION, "{\"prompt\":[5,\"a\"]}", "prompt", "not a string"},
    {API_COMPLETION, "{\"prompt\":[-1]}", "prompt", "from 0 to"},
    {API_COMPLETION, "{\"prompt\":[100000]}", "prompt", "from 0 to"},
    {API_COMPLETION, "{\"prompt\":[1.5]}", "prompt", "an integer"},
    {API_COMPLETION, "{\"prompt\":[true]}", "prompt", "not a boolean"},
    {API_COMPLETION, "{\"prompt\":[\"a\",\"b\",\"c\"],\"n\":64}", "n", "at most 128"},
    {API_TOKENIZE, "{\"prompt\":[1]}", "prompt", "must be a string"},
    {API_TOKENIZE, "{}", "prompt", "prompt or messages"},
};

static void whole_body(const struct refusal *refusal, char *body, size_t size)
{
    if (refusal->body[0] == '{')
        snprintf(body, size, "%s", refusal->body);
    else
        snprintf(body, size, "{%s,%s}", refusal->kind == API_CHAT ? MESSAGES : "\"prompt\":\"he\"", refusal->body);
}

Test(api_request, test_api_request_refuses_bad_values_by_name)
{
    for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
        const struct refusal *refusal = &refusals[i];
        char body[4096];
        memset(&err, 0, sizeof(err));
        whole_body(refusal, body, sizeof(body));
        cr_expect_eq(api_request_parse(refusal->kind, body, strlen(body), tok, &r, &err), -EINVAL, "taken: %s", body);
        cr_expect_eq(err.status, 400, "%s: status %d", body, err.status);
        cr_expect_str_eq(err.param, refusal->param, "%s: param %s", body, err.param);
        cr_expect(strstr(err.message, refusal->says), "%s: says %s", body, err.message);
        api_request_fini(&r);
    }
}

/* Every prefix of a body is refused, and nothing is read behind its end. */
Test(api_request, test_api_request_refuses_every_truncation)
{
    static const char body[] = "{" MESSAGES ",\"stop\":[\"a\"],\"logit_bias\":{\"3\":1},\"stream\":true,\"stream_options\":{\"include_usage\":true},\"seed\":12}";
    for (size_t n = 0; n + 1 < sizeof(body); n++) {
        char *copy = malloc(n + 1);
        memcpy(copy, body, n);
        memset(&err, 0, sizeof(err));
        if (n < sizeof(body) - 1)
            cr_assert_eq(api_request_parse(API_CHAT, copy, n, tok, &r, &err), -EINVAL, "%zu bytes", n);
        api_request_fini(&r);
        free(copy);
    }
}
