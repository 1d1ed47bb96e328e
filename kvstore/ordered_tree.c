#include "kvstore/ordered_tree.h"

#include "proto/base/base_assert.h"
#include <stdbool.h>
#include <stddef.h>

static bool node_before(const struct ordered_node *x, const struct ordered_node *y)
{
    return x->a < y->a || (x->a == y->a && x->b < y->b);
}

/* xorshift64*: priorities need to be independent of the keys, not secret. */
static uint32_t next_priority(struct ordered_tree *tree)
{
    tree->random ^= tree->random >> 12;
    tree->random ^= tree->random << 25;
    tree->random ^= tree->random >> 27;
    return (uint32_t)((tree->random * 2685821657736338717ull) >> 32);
}

void ordered_tree_init(struct ordered_tree *tree)
{
    *tree = (struct ordered_tree){.random = 0x9E3779B97F4A7C15ull};
}

/* Cuts the subtree `t` into the nodes before `node` and those after it. */
static void split(struct ordered_node *t, const struct ordered_node *node, struct ordered_node **ret_before, struct ordered_node **ret_after)
{
    while (t) {
        if (node_before(t, node)) {
            *ret_before = t;
            ret_before = &t->right;
            t = t->right;
        } else {
            *ret_after = t;
            ret_after = &t->left;
            t = t->left;
        }
    }
    *ret_before = NULL;
    *ret_after = NULL;
}

void ordered_tree_insert(struct ordered_tree *tree, struct ordered_node *node)
{
    struct ordered_node **link = &tree->root;

    node->priority = next_priority(tree);
    while (*link && (*link)->priority >= node->priority) {
        ASSERT(node_before(*link, node) || node_before(node, *link));
        link = node_before(*link, node) ? &(*link)->right : &(*link)->left;
    }
    split(*link, node, &node->left, &node->right);
    *link = node;
}

void ordered_tree_remove(struct ordered_tree *tree, struct ordered_node *node)
{
    struct ordered_node **link = &tree->root;
    struct ordered_node *before = node->left, *after = node->right;

    while (*link != node) {
        ASSERT(*link);
        link = node_before(*link, node) ? &(*link)->right : &(*link)->left;
    }
    while (before && after) {
        if (before->priority >= after->priority) {
            *link = before;
            link = &before->right;
            before = before->right;
        } else {
            *link = after;
            link = &after->left;
            after = after->left;
        }
    }
    *link = before ? before : after;
    node->left = node->right = NULL;
}

struct ordered_node *ordered_tree_first(const struct ordered_tree *tree)
{
    struct ordered_node *t = tree->root;

    while (t && t->left)
        t = t->left;
    return t;
}

struct ordered_node *ordered_tree_last(const struct ordered_tree *tree)
{
    struct ordered_node *t = tree->root;

    while (t && t->right)
        t = t->right;
    return t;
}

struct ordered_node *ordered_tree_at_least(const struct ordered_tree *tree, uint64_t a, uint64_t b)
{
    const struct ordered_node wanted = {.a = a, .b = b};
    struct ordered_node *t = tree->root, *best = NULL;

    while (t) {
        if (node_before(t, &wanted)) {
            t = t->right;
        } else {
            best = t;
            t = t->left;
        }
    }
    return best;
}
