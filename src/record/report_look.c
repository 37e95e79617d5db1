/* See report_look.h. */
#include "record/report_look.h"

#include <string.h>

#include "base/utf8.h"

void report_text(FILE *out, const char *text)
{
    const int64_t size = (int64_t)strlen(text);
    for (int64_t i = 0, n; i < size; i += n ? n : 1) {
        const unsigned char c = (unsigned char)text[i];
        n = utf8_char_bytes((const uint8_t *)text + i, size - i);
        if (n == 0) fputs("\xEF\xBF\xBD", out);
        else if (n == 2 && c == 0xC2 && (unsigned char)text[i + 1] < 0xA0) fputc(' ', out); /* C1 */
        else if (n > 1) fprintf(out, "%.*s", (int)n, text + i);
        else if (c == '<') fputs("&lt;", out);
        else if (c == '>') fputs("&gt;", out);
        else if (c == '&') fputs("&amp;", out);
        else if (c == '"') fputs("&quot;", out);
        else if (c == '\'') fputs("&#39;", out);
        else fputc(c < 0x20 || c == 0x7F ? ' ' : c, out);
    }
}

int report_mark(int run)
{
    return (run + run / 12) % 4;
} /* 12 pairs of colour and dashes, then the 12 others */

void report_look(FILE *out, int run) { fprintf(out, "c%d k%d", run % 6, report_mark(run)); }

const char *report_name(const History *runs, int count, int run)
{
    for (int i = 0; i < count; i++)
        if (i != run && strcmp(runs[i].name, runs[run].name) == 0) return runs[run].dir;
    return runs[run].name;
}
