/* The configuration file: `name = value` lines. */
#include "proto/base/options_private.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Values that came from a file live as long as the process; the list keeps them reachable for leak checkers. */
struct kept_string {
    struct kept_string *next;
    char text[];
};
static struct kept_string *kept_strings;

static char *keep_string(const char *text, size_t n)
{
    struct kept_string *kept = malloc(sizeof(*kept) + n + 1);
    if (!kept)
        return NULL;
    memcpy(kept->text, text, n);
    kept->text[n] = '\0';
    kept->next = kept_strings;
    kept_strings = kept;
    return kept->text;
}

static int read_file(const char *path, struct buf *out, struct error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        int rc = -errno;
        return error_set(err, rc, "--config: cannot open \"%.256s\": %s", path, strerror(-rc));
    }
    int rc = 0;
    for (;;) {
        rc = buf_reserve(out, 4096);
        if (rc < 0) {
            rc = error_set(err, rc == -ENOBUFS ? -E2BIG : rc, "--config: \"%.256s\" is larger than %d bytes, or memory is short", path, OPTION_FILE_MAX);
            break;
        }
        ssize_t n = read(fd, out->data + out->len, 4096);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            rc = -errno;
            error_set(err, rc, "--config: cannot read \"%.256s\": %s", path, strerror(-rc));
        }
        if (n <= 0)
            break;
        out->len += (size_t)n;
    }
    close(fd);
    return rc;
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

/* A value, as the span [s, s + n) of one line. */
struct span {
    const char *s;
    size_t n;
};

static struct span trim(struct span v)
{
    while (v.n && is_blank(v.s[0]))
        v = (struct span){v.s + 1, v.n - 1};
    while (v.n && is_blank(v.s[v.n - 1]))
        v.n--;
    return v;
}

static struct span without_comment(struct span v)
{
    for (size_t i = 0; i < v.n; i++)
        if (v.s[i] == '#' && (i == 0 || is_blank(v.s[i - 1])))
            return (struct span){v.s, i};
    return v;
}

/* Decodes the quoted value at v.s[0] == '"' into `out` [v.n]. Returns its length, or -1 when it does not end well; only a comment may follow. */
static ssize_t unquote(struct span v, char *out)
{
    static const char from[] = "ntr\"\\", to[] = "\n\t\r\"\\";
    size_t n = 0, i = 1;
    for (; i < v.n && v.s[i] != '"'; i++) {
        char c = v.s[i];
        if (c == '\\') {
            const char *escape = i + 1 < v.n ? memchr(from, v.s[i + 1], sizeof(from) - 1) : NULL;
            if (!escape)
                return -1;
            c = to[escape - from];
            i++;
        }
        out[n++] = c;
    }
    if (i >= v.n)
        return -1;
    struct span rest = trim((struct span){v.s + i + 1, v.n - i - 1});
    return rest.n == 0 || rest.s[0] == '#' ? (ssize_t)n : -1;
}

/* The value's text in memory that lives on, or NULL with *ret_error. */
static char *value_text(struct span v, int *ret_error)
{
    *ret_error = -ENOMEM;
    if (v.n == 0 || v.s[0] != '"') {
        v = trim(without_comment(v));
        return keep_string(v.s, v.n);
    }
    char *text = keep_string(v.s, v.n);
    if (!text)
        return NULL;
    ssize_t n = unquote(v, text);
    if (n < 0) {
        *ret_error = -EINVAL;
        return NULL;
    }
    text[n] = '\0';
    return text;
}

int option_file_quote(struct buf *out, const char *text)
{
    size_t n = strlen(text);
    bool plain = n > 0 && !is_blank(text[0]) && !is_blank(text[n - 1]) && !strpbrk(text, "#\"\\\n\r\t");
    if (plain)
        return buf_append(out, text, n);
    int rc = buf_append_str(out, "\"");
    for (size_t i = 0; i < n && rc == 0; i++) {
        static const char from[] = "\n\t\r\"\\", to[] = "ntr\"\\";
        const char *escape = memchr(from, text[i], sizeof(from) - 1);
        char pair[2] = {'\\', escape ? to[escape - from] : 0};
        rc = escape ? buf_append(out, pair, 2) : buf_append(out, &text[i], 1);
    }
    return rc < 0 ? rc : buf_append_str(out, "\"");
}

static int apply_line(const struct option_set *set, const char *where, struct span line, void *values, bool *given, struct error *err)
{
    line = trim(line);
    if (line.n == 0 || line.s[0] == '#')
        return 0;
    const char *equals = memchr(line.s, '=', line.n);
    if (!equals)
        return error_set(err, -EINVAL, "%s: expected `name = value`", where);
    struct span name = trim((struct span){line.s, (size_t)(equals - line.s)});
    struct span value = trim((struct span){equals + 1, line.n - (size_t)(equals + 1 - line.s)});
    struct option_place place;
    if (!option_find(set, name.s, name.n, &place))
        return error_set(err, -EINVAL, "%s: \"%.*s\" is not an option of %s", where, (int)(name.n < 64 ? name.n : 64), name.s, set->program);
    int rc = 0;
    const char *text = value_text(value, &rc);
    if (!text)
        return error_set(err, rc, "%s: --%s: %s", where, place.spec->name, rc == -EINVAL ? "the quoted value does not end, or has an unknown escape" : "out of memory");
    return option_set_value(&place, where, text, values, given, err);
}

int option_file_apply(const struct option_set *set, const char *path, void *values, bool *given, struct error *err)
{
    struct buf file;
    buf_init(&file, OPTION_FILE_MAX);
    int rc = read_file(path, &file, err);
    if (rc < 0)
        goto done;
    if (file.len && memchr(file.data, 0, file.len)) {
        rc = error_set(err, -EINVAL, "--config: \"%.256s\" holds a NUL byte; it is not a text file", path);
        goto done;
    }
    const char *s = buf_cstr(&file);
    for (int line_no = 1; *s && rc == 0; line_no++) {
        size_t n = strcspn(s, "\n");
        char where[OPTION_WHERE_MAX];
        snprintf(where, sizeof(where), "%.256s line %d", path, line_no);
        rc = apply_line(set, where, (struct span){s, n}, values, given, err);
        s += n + (s[n] == '\n');
    }
done:
    buf_fini(&file);
    return rc;
}
