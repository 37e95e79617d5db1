/* The program's version, stated once. */
#ifndef MEGATRAIN_BASE_VERSION_H
#define MEGATRAIN_BASE_VERSION_H

#define MEGATRAIN_VERSION "0.1.0"

#endif
