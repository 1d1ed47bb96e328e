/* An intrusive ordered set: a treap whose nodes are ordered by two 64-bit numbers (a, then b). The pair must be unique within a tree.
 * All calls are O(log n) expected, allocate nothing and cannot fail. Not thread-safe. Nodes are the caller's.
 * Source: Aragon and Seidel, Randomized search trees (1989). */
#pragma once
#include <stdint.h>

struct ordered_node {
    struct ordered_node *left, *right;
    uint64_t a, b;     /* the order; set before ordered_tree_insert, unchanged while in a tree */
    uint32_t priority; /* heap order, drawn by ordered_tree_insert */
};

struct ordered_tree {
    struct ordered_node *root;
    uint64_t random; /* state of the generator of priorities */
};

void ordered_tree_init(struct ordered_tree *tree);
void ordered_tree_insert(struct ordered_tree *tree, struct ordered_node *node);
void ordered_tree_remove(struct ordered_tree *tree, struct ordered_node *node);
/* Smallest and largest node, and the smallest that is not below (a, b); NULL if there is none. */
struct ordered_node *ordered_tree_first(const struct ordered_tree *tree);
struct ordered_node *ordered_tree_last(const struct ordered_tree *tree);
struct ordered_node *ordered_tree_at_least(const struct ordered_tree *tree, uint64_t a, uint64_t b);
