/**
 * @file file.h
 * @brief Memory to a file and back, with its checksum on the way: what checkpoints are made of.
 */
#ifndef TDDP_FILE_H
#define TDDP_FILE_H

#include <stddef.h>
#include <stdint.h>

#include <tddp/wait.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The CRC-32 of zlib, gzip and PNG, of bytes that follow those with the checksum `crc`; 0 to
 *  begin. */
TDDP_API uint32_t tddp_crc32(uint32_t crc, const void *data, size_t size);

/**
 * A piece of a file on its way. Zeroed but for the first five, which stay as they are: a call that
 * was canceled can be repeated with the same piece, and continues where it was.
 */
typedef struct tddp_file_piece {
    int fd;           /**< borrowed; its position is not used */
    const char *name; /**< of the file, for texts; borrowed */
    uint64_t offset;  /**< where the piece begins in the file */
    void *data;       /**< memory; NULL when reading: for the checksum alone */
    size_t size;      /**< bytes */
    size_t done;      /**< bytes that are through */
    uint32_t crc;     /**< CRC-32 of these */
} tddp_file_piece;

/**
 * Writes the piece. Blocks as long as the disk does; `wait` can end it early, its time is not used.
 * Errors: TDDP_CANCELED, TDDP_SYSTEM (the disk is full, for instance: the text names the file and
 * how far it got).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_file_write(tddp_file_piece *piece, const tddp_wait *wait);

/**
 * Reads the piece, or only its checksum. Errors: those of tddp_file_write(); TDDP_NOT_FOUND (the
 * file ends before the piece does), TDDP_OUT_OF_MEMORY.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_file_read(tddp_file_piece *piece, const tddp_wait *wait);

#ifdef __cplusplus
}
#endif

#endif
