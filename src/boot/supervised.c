/* See supervised.h. */
#include "boot/supervised.h"

#include <stdio.h>

void supervised_cause(Supervised *s, const char *text)
{
    if (s) snprintf(s->cause, sizeof s->cause, "%s", text);
}
