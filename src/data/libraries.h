/* Names and versions of the libraries behind this folder, for --version and doctor. */
#ifndef MEGATRAIN_DATA_LIBRARIES_H
#define MEGATRAIN_DATA_LIBRARIES_H

enum { LIBRARIES_BYTES = 96 };

/* "PCRE2 10.42, utf8proc 2.8.0, ...": what is loaded, not what was there when this was compiled. */
const char *data_libraries(char buf[LIBRARIES_BYTES]);

#endif
