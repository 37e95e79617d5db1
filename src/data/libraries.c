/* See libraries.h. */
#include "data/libraries.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include <string.h>
#include <utf8proc.h>
#include <zlib.h>
#include <zstd.h>

const char *data_libraries(char buf[LIBRARIES_BYTES])
{
    char pcre2[32] = "?"; /* "10.42 2022-12-11" */
    if (pcre2_config(PCRE2_CONFIG_VERSION, NULL) <= (int)sizeof pcre2) pcre2_config(PCRE2_CONFIG_VERSION, pcre2);
    pcre2[strcspn(pcre2, " ")] = 0;
    snprintf(buf, LIBRARIES_BYTES, "PCRE2 %s, utf8proc %s, zlib %s, zstd %s", pcre2, utf8proc_version(), zlibVersion(),
             ZSTD_versionString());
    return buf;
}
