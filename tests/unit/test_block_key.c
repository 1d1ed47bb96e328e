#include "proto/block_key.h"
#include "proto/block_layout.h"
#include <criterion/criterion.h>
#include <sodium.h>
#include <string.h>

static uint8_t fingerprint[FINGERPRINT_BYTES];
static int32_t ascending[BLOCK_TOKENS], odd[BLOCK_TOKENS];

static void setup(void)
{
    cr_assert_geq(sodium_init(), 0);
    for (int i = 0; i < FINGERPRINT_BYTES; i++)
        fingerprint[i] = (uint8_t)i;
    for (int i = 0; i < BLOCK_TOKENS; i++) {
        ascending[i] = i;
        odd[i] = i == 0 ? -1 : 99999 + i;
    }
}

TestSuite(block_key, .init = setup);

static void check(const struct block_key *key, const char *hex)
{
    char text[2 * BLOCK_KEY_BYTES + 1];
    sodium_bin2hex(text, sizeof(text), key->bytes, BLOCK_KEY_BYTES);
    cr_assert_str_eq(text, hex);
}

/* Expected values from Python's hashlib.blake2b over the same bytes. */
Test(block_key, test_chain_is_blake2b_of_the_documented_bytes)
{
    struct block_key root, k1, k2, generated;
    block_key_root(fingerprint, "tenant", 6, &root);
    check(&root, "287888cc7b05817101ca45e3dc0b83ad1096f3b1cd9cfa4cb4064cb26bc4689e");
    block_key_next(&root, ascending, &k1);
    check(&k1, "d6077c8966883b3a25835a353e6acaa1b51ed1d2e7df5de7b42894041d29cd47");
    block_key_next(&k1, odd, &k2);
    check(&k2, "99105ed94ddd1e6a2d7c0601055e4eda3ab505442c03446c650c8ab39fa86d15");
    block_key_next_generated(&k1, odd, "snapkv", 6, &generated);
    check(&generated, "b872b2beecc0723b9c740cd1e377472d8981e962f55d4b3264d5081c36ece1d1");
}

Test(block_key, test_empty_salt_is_the_shared_namespace)
{
    struct block_key root;
    block_key_root(fingerprint, NULL, 0, &root);
    check(&root, "cb2f5160fc1f7e05a55ef49d340b48da2e5a78099d53393351cd579dd42503d6");
}

Test(block_key, test_result_may_stand_in_place_of_the_parent)
{
    struct block_key key, expected;
    block_key_root(fingerprint, NULL, 0, &key);
    block_key_next(&key, ascending, &expected);
    block_key_next(&key, ascending, &key);
    cr_assert(memcmp(&key, &expected, sizeof(key)) == 0);
}

Test(block_key, test_each_token_and_the_parent_matter)
{
    struct block_key root, other, base, changed;
    block_key_root(fingerprint, NULL, 0, &root);
    block_key_root(fingerprint, "a", 1, &other);
    block_key_next(&root, ascending, &base);
    block_key_next(&other, ascending, &changed);
    cr_assert(memcmp(&base, &changed, sizeof(base)) != 0);
    for (int i = 0; i < BLOCK_TOKENS; i++) {
        ascending[i] ^= 1 << 30;
        block_key_next(&root, ascending, &changed);
        cr_assert(memcmp(&base, &changed, sizeof(base)) != 0, "token %d", i);
        ascending[i] ^= 1 << 30;
    }
}

/* Without a tag the bytes hashed are those of a prompt's block; the keys must still differ. */
Test(block_key, test_generated_blocks_never_share_a_prompts_key)
{
    struct block_key root, prompt, generated, tagged;
    block_key_root(fingerprint, NULL, 0, &root);
    block_key_next(&root, ascending, &prompt);
    block_key_next_generated(&root, ascending, NULL, 0, &generated);
    block_key_next_generated(&root, ascending, "x", 1, &tagged);
    cr_assert(memcmp(&prompt, &generated, sizeof(prompt)) != 0);
    cr_assert(memcmp(&tagged, &generated, sizeof(prompt)) != 0);
}
