/*
 * Writes and reads tensors' memory over <tddp/file.h>, without the GVL. Called by Ruby threads that
 * hold it. The tensor lives until the call returns; a concurrent write to its memory would corrupt
 * the file.
 */
#include "torch_ddp.h"

#include <tddp/file.h>

/* A transfer of a tensor's memory, or only the checksum of a file's bytes. */
typedef struct transfer {
    tddp_file_piece piece;
    bool writes;
} transfer;

static tddp_status body_transfer(void *data, const tddp_wait *wait)
{
    transfer *call = data;
    return call->writes ? tddp_file_write(&call->piece, wait) : tddp_file_read(&call->piece, wait);
}

/* Returns the checksum. The transfer can be restarted, so signal handlers may run. */
static VALUE perform(transfer *call, VALUE name)
{
    call->piece.name = StringValueCStr(name);
    tddp_rb_raise_outcome(tddp_rb_blocking(body_transfer, call, -1, false));
    return UINT2NUM(call->piece.crc);
}

static tddp_file_piece piece_at(VALUE fd, VALUE offset)
{
    return (tddp_file_piece){.fd = NUM2INT(fd), .offset = NUM2ULL(offset)};
}

/* Callers give the CPU's memory; the kernel would refuse any other. */
static void set_memory(tddp_file_piece *piece, VALUE tensor)
{
    tddp_buffer buffer = tddp_rb_buffer(tensor, "tensor");
    piece->data = buffer.data;
    piece->size = buffer.count * tddp_dtype_size(buffer.dtype);
}

/* _write_tensor(tensor, fd, name, offset) -> its CRC-32 */
static VALUE write_tensor(VALUE self, VALUE tensor, VALUE fd, VALUE name, VALUE offset)
{
    transfer call = {.piece = piece_at(fd, offset), .writes = true};
    set_memory(&call.piece, tensor);
    return perform(&call, name);
}

/* _read_tensor(tensor, fd, name, offset) -> the CRC-32 of what was read into it */
static VALUE read_tensor(VALUE self, VALUE tensor, VALUE fd, VALUE name, VALUE offset)
{
    transfer call = {.piece = piece_at(fd, offset)};
    set_memory(&call.piece, tensor);
    tddp_rb_written(tensor);
    return perform(&call, name);
}

/* _read_checksum(size, fd, name, offset) -> the CRC-32 of what is there */
static VALUE read_checksum(VALUE self, VALUE size, VALUE fd, VALUE name, VALUE offset)
{
    transfer call = {.piece = piece_at(fd, offset)};
    call.piece.size = NUM2SIZET(size);
    return perform(&call, name);
}

/* _crc32(bytes) */
static VALUE crc32_of(VALUE self, VALUE bytes)
{
    StringValue(bytes);
    return UINT2NUM(tddp_crc32(0, RSTRING_PTR(bytes), (size_t)RSTRING_LEN(bytes)));
}

void tddp_rb_init_tensor_file(void)
{
    rb_define_singleton_method(tddp_rb_distributed, "_write_tensor", write_tensor, 4);
    rb_define_singleton_method(tddp_rb_distributed, "_read_tensor", read_tensor, 4);
    rb_define_singleton_method(tddp_rb_distributed, "_read_checksum", read_checksum, 4);
    rb_define_singleton_method(tddp_rb_distributed, "_crc32", crc32_of, 1);
}
