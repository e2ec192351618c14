/*
 * The optional shared secret: both ends prove by challenge and response that they know it. Opcodes
 * are outside PyTorch's range; without a secret none of this is on the wire.
 *
 *     client                                      server
 *       00 magic               (the hello of 2.x)
 *       f0 NC (32 bytes)        ---------------->
 *                               <----------------  00 NS (32 bytes), or 01: no secret is set here
 *       f1 proof (32 bytes)     ---------------->  proof = HMAC(secret, "client" label, NC, NS)
 *                               <----------------  00 proof with the "server" label, or 01: wrong
 *       0d and all the rest of the protocol
 *
 * NC and NS are random and new for each connection, so no recording can be played again; the labels
 * differ, so neither end can be made to prove itself with its own answer. The client proves first:
 * an unrelated process that connects learns nothing that depends on the secret. A client that sends
 * other requests without proof is dropped; a PING, with which all clients of 2.x begin, is answered
 * with TDDP_AUTH_WANTED.
 */
#ifndef TDDP_STORE_AUTH_H
#define TDDP_STORE_AUTH_H

#include "base/base.h"
#include "store/wire.h"

enum {
    TDDP_AUTH_GRANTED = 0,
    TDDP_AUTH_REFUSED = 1,
    TDDP_AUTH_LEAST_BYTES = 16, /* of a shorter secret a line warns */
    TDDP_AUTH_MOST_BYTES = 4096,
};

/* A server with a secret answers an unauthenticated PING with it, in place of the nonce: a process
 * id, as which it would be too large. */
#define TDDP_AUTH_WANTED UINT32_C(0xFEED5EC2)

typedef struct tddp_auth {
    unsigned char client[TDDP_WIRE_AUTH_BYTES]; /* NC */
    unsigned char server[TDDP_WIRE_AUTH_BYTES]; /* NS */
} tddp_auth;

/* The secret of this process's environment: tddp_auth_secret_free(). NULL if there is none. */
TDDP_NODISCARD tddp_status tddp_auth_secret(char **out);

/* Whether there is one, or ought to be. */
bool tddp_auth_wanted(void);

/* A copy of a secret given as text; NULL if that is empty. */
TDDP_NODISCARD tddp_status tddp_auth_secret_copy(const char *text, char **out);
void tddp_auth_secret_free(char *secret);

TDDP_NODISCARD tddp_status tddp_auth_random(unsigned char out[TDDP_WIRE_AUTH_BYTES]);
void tddp_auth_proof(const char *secret, bool of_server, const tddp_auth *auth,
                     unsigned char out[TDDP_WIRE_AUTH_BYTES]);

/* The client's side on a fresh connection, if its environment has a secret: then VALIDATE is sent
 * too (`*validated`). TDDP_STORE: the ends do not share the secret; trying again is of no use. */
TDDP_NODISCARD tddp_status tddp_auth_to_server(int fd, int64_t deadline_ns, int cancel_fd,
                                               bool *validated);

/* Sends so many bytes and receives as many as are to answer them. */
TDDP_NODISCARD tddp_status tddp_auth_ask(int fd, const void *request, size_t size, void *answer,
                                         size_t answer_size, int64_t deadline_ns, int cancel_fd);

/* The failure of a client without a secret whose server requires one. */
tddp_status tddp_auth_fail_wanted(void);

#endif
