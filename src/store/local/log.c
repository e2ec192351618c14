/*
 * The file of a file store: records `u32 key length, key, u32 value length, value`, a key has
 * the value of its last record, and a record of `-/k` removes /k (likewise for every key with a
 * dash in front). Written under an exclusive flock, read under a shared one, through a descriptor
 * opened for each access, since a lock belongs to a descriptor. Invariant: `values` is the state
 * after the first `read_to` bytes of the file.
 */
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/local/local.h"

static tddp_status fail_file(const tddp_local_log *log, const char *what)
{
    return tddp_fail(TDDP_STORE, "file store %s: %s: %s", log->path, what, strerror(errno));
}

static void forget(tddp_local_log *log)
{
    tddp_store_map_clear(&log->values);
    log->read_to = 0;
}

/* Applies one record to the values. */
static tddp_status apply(tddp_local_log *log, tddp_slice key, tddp_slice value)
{
    if (key.size > 1 && key.data[0] == '-') {
        tddp_slice removed = {key.data + 1, key.size - 1};
        tddp_store_entry *entry = tddp_store_map_find(&log->values, removed);
        if (entry) {
            tddp_store_map_remove(&log->values, entry);
        }
        return TDDP_OK;
    }
    return tddp_store_values_set(&log->values, key, value);
}

/* Takes a length and as many bytes from `data`. */
static bool take(tddp_slice *data, tddp_slice *out)
{
    uint32_t size;
    if (data->size < sizeof size) {
        return false;
    }
    memcpy(&size, data->data, sizeof size);
    size = le32toh(size);
    if (data->size - sizeof size < size) {
        return false;
    }
    *out = (tddp_slice){data->data + sizeof size, size};
    data->data += sizeof size + size;
    data->size -= sizeof size + size;
    return true;
}

static tddp_status read_bytes(const tddp_local_log *log, int fd, char *data, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t got = pread(fd, data + done, size - done, log->read_to + (off_t)done);
        if (got > 0) {
            done += (size_t)got;
        } else if (got == 0 || errno != EINTR) {
            errno = got == 0 ? EIO : errno;
            return fail_file(log, "read");
        }
    }
    return TDDP_OK;
}

/* Applies the records that follow those known. */
static tddp_status apply_records(tddp_local_log *log, tddp_slice left)
{
    tddp_status status = TDDP_OK;
    while (status == TDDP_OK && left.size) {
        tddp_slice key = {0};
        tddp_slice value = {0};
        if (!take(&left, &key) || !take(&left, &value)) {
            return tddp_fail(TDDP_STORE,
                             "file store %s: no complete record at byte %lld: not a store's file, "
                             "or its writer was killed; use a fresh path",
                             log->path, (long long)log->read_to);
        }
        status = apply(log, key, value);
        if (status == TDDP_OK) {
            log->read_to += (off_t)(8 + key.size + value.size);
        }
    }
    return status;
}

static tddp_status read_records(tddp_local_log *log, int fd, size_t size)
{
    char *data = tddp_alloc(size);
    if (!data) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = read_bytes(log, fd, data, size);
    status = status ? status : apply_records(log, (tddp_slice){data, size});
    free(data);
    return status;
}

static tddp_status catch_up(tddp_local_log *log, int fd)
{
    struct stat now;
    struct stat named;
    if (fstat(fd, &now)) {
        return fail_file(log, "fstat");
    }
    /* The last user may have removed the file between our open and our lock. */
    if (stat(log->path, &named) || now.st_ino != named.st_ino || now.st_dev != named.st_dev) {
        return tddp_fail(TDDP_TIMEOUT, "file store %s: the file was replaced", log->path);
    }
    if (now.st_ino != log->inode || now.st_dev != log->device || now.st_size < log->read_to) {
        forget(log); /* another run's file by the same name */
        log->inode = now.st_ino;
        log->device = now.st_dev;
    }
    size_t fresh = (size_t)(now.st_size - log->read_to);
    return fresh ? read_records(log, fd, fresh) : TDDP_OK;
}

tddp_status tddp_local_begin(tddp_local_log *log, bool write, tddp_local_access *access)
{
    *access = (tddp_local_access){.fd = -1};
    int fd;
    if (!log->path) {
        return TDDP_OK;
    }
    do {
        fd = open(log->path, write ? O_RDWR | O_CREAT | O_CLOEXEC : O_RDONLY | O_CLOEXEC, 0644);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0 && errno == ENOENT && !write) {
        forget(log);
        return TDDP_OK;
    }
    if (fd < 0) {
        return fail_file(log, "open");
    }
    tddp_status status;
    if (flock(fd, (write ? LOCK_EX : LOCK_SH) | LOCK_NB)) {
        bool busy = errno == EWOULDBLOCK || errno == EINTR;
        status =
            busy ? tddp_fail(TDDP_TIMEOUT, "file store %s: another process has the lock", log->path)
                 : fail_file(log, "flock");
    } else {
        status = catch_up(log, fd);
    }
    if (status) {
        tddp_close(fd);
        return status;
    }
    access->fd = fd;
    return TDDP_OK;
}

static tddp_status put_part(tddp_local_access *access, const char *mark, tddp_slice part)
{
    size_t size = strlen(mark) + part.size;
    if (size > UINT32_MAX) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "file store: %zu bytes, at most %u", size,
                         UINT32_MAX);
    }
    uint32_t length = htole32((uint32_t)size);
    tddp_status status = tddp_bytes_append(&access->records, &length, sizeof length);
    status = status ? status : tddp_bytes_append(&access->records, mark, strlen(mark));
    return status ? status : tddp_bytes_append(&access->records, part.data, part.size);
}

tddp_status tddp_local_put(tddp_local_access *access, tddp_slice key, tddp_slice value)
{
    tddp_status status = put_part(access, "", key);
    return status ? status : put_part(access, "", value);
}

tddp_status tddp_local_put_deletion(tddp_local_access *access, tddp_slice key)
{
    tddp_status status = put_part(access, "-", key);
    return status ? status : put_part(access, "", (tddp_slice){"", 0});
}

/* All records or none: after a failure the file is cut back to what it was. */
static tddp_status write_records(const tddp_local_log *log, const tddp_local_access *access)
{
    size_t done = 0;
    while (done < access->records.size) {
        ssize_t wrote = pwrite(access->fd, access->records.data + done, access->records.size - done,
                               log->read_to + (off_t)done);
        if (wrote >= 0) {
            done += (size_t)wrote;
        } else if (errno != EINTR) {
            tddp_status status = fail_file(log, "write");
            if (ftruncate(access->fd, log->read_to)) {
                status = fail_file(log, "a record was written in part, and ftruncate");
            }
            return status;
        }
    }
    return TDDP_OK;
}

tddp_status tddp_local_end(tddp_local_log *log, tddp_local_access *access, tddp_status status)
{
    if (status == TDDP_OK && access->records.size) {
        status = log->path
                     ? write_records(log, access)
                     : apply_records(log, (tddp_slice){access->records.data, access->records.size});
    }
    tddp_bytes_free(&access->records);
    tddp_close(access->fd);
    access->fd = -1;
    return status;
}
