/* See words.h. One row of the table of distances is kept. */
#include "base/words.h"

#include <ctype.h>
#include <string.h>

int word_distance(const char *a, const char *b)
{
    enum { LONGEST = 63 };
    int row[LONGEST + 1];
    int n = (int)strlen(a), m = (int)strlen(b);
    if (n > LONGEST || m > LONGEST) return LONGEST;
    for (int j = 0; j <= m; j++) row[j] = j;
    for (int i = 1; i <= n; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= m; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[m];
}

const char *word_nearest(const char *word, const char *const *words, int count)
{
    const char *nearest = NULL;
    const size_t n = strlen(word);
    int best = n <= 1 ? 1 : n <= 3 ? 2 : 3;
    for (int i = 0; i < count; i++) {
        int distance = word_distance(word, words[i]);
        if (distance >= best) continue;
        best = distance;
        nearest = words[i];
    }
    return nearest;
}

bool text_ends(const char *text, const char *end)
{
    const size_t n = strlen(text), k = strlen(end);
    return n >= k && strcmp(text + n - k, end) == 0;
}

void text_cut(char *out, size_t size_bytes, const char *text)
{
    size_t n = strnlen(text, size_bytes);
    if (n == size_bytes)
        for (n = size_bytes - 1; n > 0 && (text[n] & 0xC0) == 0x80; n--) {}
    memcpy(out, text, n);
    out[n] = 0;
}

/* End of the quote with which a word begins, perhaps behind an '@'; NULL: it begins with none. */
static const char *closing_quote(const char *word)
{
    word += *word == '@';
    if (*word != '\'' && *word != '"') return NULL;
    for (const char *at = word; (at = strchr(at + 1, *word));)
        if (!at[1] || isspace((unsigned char)at[1])) return at;
    return NULL;
}

size_t word_length(const char *word)
{
    const char *quote = closing_quote(word), *end = quote ? quote + 1 : word;
    while (*end && !isspace((unsigned char)*end)) end++;
    return (size_t)(end - word);
}

char *word_bare(char *word)
{
    const char *quote = closing_quote(word);
    if (!quote || quote[1]) return word;
    word[quote - word] = 0;
    if (*word == '@') word[1] = '@';
    return word + 1;
}
