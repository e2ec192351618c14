/*
 * Memory to a file and back in pieces, each with its CRC-32. Any thread; the descriptor is the
 * caller's. Invariant: `done` bytes of a piece are through and `crc` is theirs, whenever a function
 * returns, so that a canceled call can be made again. The caller makes files durable,
 * names them, and knows the expected checksum.
 */
#include "base/base.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <tddp/file.h>

/* Small enough to be in the processor's cache when the checksum is taken, and to notice a cancel;
 * large enough that system calls do not count. */
enum { CHUNK_BYTES = 1 << 20 };

static size_t chunk_of(const tddp_file_piece *piece)
{
    const size_t left = piece->size - piece->done;
    return left < CHUNK_BYTES ? left : CHUNK_BYTES;
}

static tddp_status canceled(const tddp_file_piece *piece, const tddp_wait *wait, const char *what)
{
    if (!wait || !wait->cancel || !tddp_cancel_triggered(wait->cancel)) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_CANCELED, "%s %s was interrupted after %zu of %zu bytes", what,
                     piece->name, piece->done, piece->size);
}

static tddp_status failed(const tddp_file_piece *piece, const char *what, int error)
{
    return tddp_fail(TDDP_SYSTEM, "%s %s: %s, after %zu of %zu bytes at offset %" PRIu64, what,
                     piece->name, strerror(error), piece->done, piece->size, piece->offset);
}

static void through(tddp_file_piece *piece, const void *data, size_t size)
{
    piece->crc = tddp_crc32(piece->crc, data, size);
    piece->done += size;
}

tddp_status tddp_file_write(tddp_file_piece *piece, const tddp_wait *wait)
{
    while (piece->done < piece->size) {
        const tddp_status status = canceled(piece, wait, "writing");
        if (status != TDDP_OK) {
            return status;
        }
        const char *from = (const char *)piece->data + piece->done;
        const off_t at = (off_t)(piece->offset + piece->done);
        const ssize_t count = pwrite(piece->fd, from, chunk_of(piece), at);
        if (count < 0 && errno != EINTR) {
            return failed(piece, "cannot write", errno);
        }
        /* A disk that takes nothing has no room, though POSIX does not say how that is reported. */
        if (count == 0) {
            return failed(piece, "cannot write", ENOSPC);
        }
        if (count > 0) {
            through(piece, from, (size_t)count);
        }
    }
    return TDDP_OK;
}

static tddp_status read_with(tddp_file_piece *piece, void *scratch, const tddp_wait *wait)
{
    while (piece->done < piece->size) {
        const tddp_status status = canceled(piece, wait, "reading");
        if (status != TDDP_OK) {
            return status;
        }
        void *into = scratch ? scratch : (char *)piece->data + piece->done;
        const off_t at = (off_t)(piece->offset + piece->done);
        const ssize_t count = pread(piece->fd, into, chunk_of(piece), at);
        if (count < 0 && errno != EINTR) {
            return failed(piece, "cannot read", errno);
        }
        if (count == 0) {
            return tddp_fail(TDDP_NOT_FOUND,
                             "%s ends at byte %" PRIu64 ", but the %zu bytes from %" PRIu64
                             " were expected in it",
                             piece->name, piece->offset + piece->done, piece->size, piece->offset);
        }
        if (count > 0) {
            through(piece, into, (size_t)count);
        }
    }
    return TDDP_OK;
}

tddp_status tddp_file_read(tddp_file_piece *piece, const tddp_wait *wait)
{
    if (piece->data || piece->size == 0) {
        return read_with(piece, NULL, wait);
    }
    void *scratch = tddp_alloc(piece->size < CHUNK_BYTES ? piece->size : CHUNK_BYTES);
    if (!scratch) {
        return TDDP_OUT_OF_MEMORY;
    }
    const tddp_status status = read_with(piece, scratch, wait);
    free(scratch);
    return status;
}
