/* What the files of the CUDA runtime's stand-in share. */
#ifndef TDDP_TEST_STANDIN_CUDART_H
#define TDDP_TEST_STANDIN_CUDART_H

#include "standin/standin.h"

#define EXPORT STANDIN_API

/* Declared for themselves: real ones come with CUDA's headers. */
#define DECLARE(result, name, arguments) STANDIN_API result name arguments;
TDDP_CUDA_CALLS(DECLARE)
#undef DECLARE

/* The error that the call of this name is to give, which is the thread's last one then; 0: none. */
tddp_cuda_error standin_fail(const char *name);

#define FAIL_IF_TOLD()                                  \
    do {                                                \
        tddp_cuda_error error = standin_fail(__func__); \
        if (error) {                                    \
            return error;                               \
        }                                               \
    } while (0)

/* Has the device that is current here a context. */
void standin_make_context(void);

/* Zeroed bytes at a multiple of 64; how many such pieces there are. */
void *standin_make_piece(size_t bytes);
void standin_free_piece(void *data);
int standin_pieces(void);

#endif
