/*
 * Operations on memory that what carries the group does not take: CUDA memory where that works on
 * the host, through pinned memory of it; host memory where that works on devices, through memory of
 * the group's device. Entered by whoever carries an operation out, posts or finishes a message.
 *
 * Invariants: the state lives in the work from the first step to the last and is used by one thread
 * at a time. What a rank does not give is not copied in, what it does not get is not copied out.
 * Memory with copies that are not known to be over is used for nothing else.
 */
#include "group/staging.h"

#include <stdlib.h>

typedef struct tddp_group_staged staged;

tddp_device_type tddp_group_carried_type(const tddp_group *group, tddp_device_type type)
{
    bool takes = (group->backend->device_types >> type & 1u) != 0;
    return takes ? type : type == TDDP_CPU ? TDDP_CUDA : TDDP_CPU;
}

bool tddp_group_stages_for_queue(const tddp_group *group, tddp_device_type type)
{
    return type == TDDP_CPU && (group->backend->traits & TDDP_BACKEND_QUEUES) &&
           tddp_group_carried_type(group, type) != TDDP_CPU;
}

/* --- whether it can be done ------------------------------------------------------------------ */

static tddp_status check_capture(const tddp_cuda *cuda, const char *name, const tddp_group *group,
                                 const tddp_buffer *buffer)
{
    int capture = TDDP_CUDA_NO_CAPTURE;
    tddp_cuda_error error = cuda->cudaStreamIsCapturing(buffer->stream, &capture);
    if (error == TDDP_CUDA_SUCCESS && capture == TDDP_CUDA_NO_CAPTURE) {
        return TDDP_OK;
    }
    (void)cuda->cudaGetLastError();
    return tddp_fail(
        TDDP_UNSUPPORTED,
        "%s: a CUDA graph is being captured, and backend %s copies cuda memory through "
        "the host's, which a graph cannot do: use nccl, or call it outside of the "
        "graph",
        name, group->requested->name);
}

/* Without a device of its own a group copies over the one that its first caller is on. */
static void settle_device(tddp_group *group, const tddp_cuda *cuda)
{
    int none = -1;
    int device = 0;
    if (atomic_load(&group->staging_device) < 0 && cuda->cudaGetDevice(&device) == 0) {
        (void)atomic_compare_exchange_strong(&group->staging_device, &none, device);
    }
}

tddp_status tddp_group_check_staging(tddp_group *group, const char *name, const tddp_buffer *buffer)
{
    const tddp_device_type type = buffer->device_type;
    const uint32_t both = 1u << TDDP_CPU | 1u << TDDP_CUDA;
    if ((type != TDDP_CPU && type != TDDP_CUDA) || !(group->backend->device_types & both)) {
        return tddp_fail(TDDP_UNSUPPORTED, "%s: backend %s takes no %s memory (device type %d)",
                         name, group->requested->name, tddp_device_type_name(type), (int)type);
    }
    const tddp_cuda *cuda;
    if (tddp_cuda_get(&cuda)) {
        return tddp_fail(TDDP_UNSUPPORTED,
                         "%s: backend %s takes no %s memory, and it cannot be copied: %s", name,
                         group->requested->name, tddp_device_type_name(type), tddp_error_message());
    }
    if (type == TDDP_CPU) {
        settle_device(group, cuda);
        return TDDP_OK;
    }
    return check_capture(cuda, name, group, buffer);
}

/* --- the state ------------------------------------------------------------------------------- */

static tddp_status open_block_pool(tddp_group *group, const tddp_cuda *cuda,
                                   tddp_group_block_pool **out)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&group->mutex);
    if (!group->block_pool) {
        status = tddp_group_block_pool_create(cuda, &group->block_pool);
    }
    if (status == TDDP_OK) {
        *out = tddp_group_block_pool_retain(group->block_pool);
    }
    pthread_mutex_unlock(&group->mutex);
    return status;
}

void tddp_group_staged_free(staged *self)
{
    if (!self) {
        return;
    }
    if (self->block) {
        tddp_group_block_pool_return(self->block_pool, self->block, false);
    }
    tddp_group_block_pool_release(self->block_pool);
    tddp_group_layout_free(&self->layout);
    free(self->parts);
    free(self);
}

/* Which of its buffers this rank gives, and which it gets. */
static bool gives(const tddp_group *group, const tddp_op *op)
{
    bool at_root = op->root == group->rank;
    bool only_root = op->kind == TDDP_OP_BROADCAST || op->kind == TDDP_OP_SCATTER;
    return op->kind != TDDP_OP_RECV && (!only_root || at_root);
}

static bool gets(const tddp_group *group, const tddp_op *op)
{
    bool at_root = op->root == group->rank;
    bool only_root = op->kind == TDDP_OP_REDUCE || op->kind == TDDP_OP_GATHER;
    bool only_others = op->kind == TDDP_OP_BROADCAST;
    return op->kind != TDDP_OP_SEND && (!only_root || at_root) && (!only_others || !at_root);
}

/* The buffers of one side: the whole of them where they lie in one piece. */
static void add_side(tddp_group_layout *layout, const tddp_buffer *whole, const tddp_buffer *parts,
                     size_t count, bool in, bool out)
{
    if (whole->data || !parts) {
        tddp_group_layout_add(layout, whole, in, out);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        tddp_group_layout_add(layout, &parts[i], in, out);
    }
}

static void collect(const tddp_group *group, const tddp_work *work, size_t bundled,
                    tddp_group_layout *layout)
{
    const tddp_op *op = &work->op;
    const size_t world = (size_t)group->world_size;
    bool in = gives(group, op);
    bool out = gets(group, op);
    if (bundled > 0) {
        add_side(layout, &op->input, work->parts, bundled, true, true);
    } else if (op->input.data && op->input.data == op->output.data &&
               op->input.count == op->output.count && !op->input_parts && !op->output_parts) {
        tddp_group_layout_add(layout, &op->input, in, out);
    } else {
        add_side(layout, &op->input, op->input_parts, world, in, false);
        add_side(layout, &op->output, op->output_parts, world, false, out);
    }
}

/* --- what the carrier is given --------------------------------------------------------------- */

static tddp_buffer moved(const staged *self, tddp_buffer buffer)
{
    buffer.device_type = self->type;
    buffer.device_index = self->type == TDDP_CUDA ? self->device : 0;
    buffer.stream = self->block ? self->block->stream : NULL;
    if (buffer.data && buffer.count > 0) {
        buffer.data = self->block->data + tddp_group_layout_offset(&self->layout, buffer.data);
    }
    return buffer;
}

static void move_all(const staged *self, const tddp_buffer *from, tddp_buffer *into, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        into[i] = moved(self, from[i]);
    }
}

/* Parts that lay apart may lie in one piece there. */
static tddp_status translate(const tddp_group *group, tddp_work *work, staged *self, size_t bundled)
{
    const tddp_op *op = &work->op;
    const size_t world = (size_t)group->world_size;
    const size_t inputs = op->input_parts && bundled == 0 ? world : 0;
    const size_t outputs = op->output_parts && bundled == 0 ? world : 0;
    const size_t count = inputs + outputs + bundled;
    self->op = *op;
    self->op.input = moved(self, op->input);
    self->op.output = moved(self, op->output);
    if (count == 0) {
        return TDDP_OK;
    }
    self->parts = tddp_alloc_array(count, sizeof *self->parts);
    if (!self->parts) {
        return TDDP_OUT_OF_MEMORY;
    }
    if (bundled > 0) {
        move_all(self, work->parts, self->parts, bundled);
        self->op.input = tddp_buffers_joined(self->parts, bundled);
        self->op.output = self->op.input;
        self->op.output_parts = op->bundled > 0 ? self->parts : NULL;
    }
    if (work->bundle) {
        tddp_group_bundle_use(work->bundle, self->parts);
    }
    if (inputs > 0) {
        self->op.input_parts = self->parts;
        move_all(self, op->input_parts, self->parts, inputs);
        self->op.input = tddp_buffers_joined(self->parts, inputs);
    }
    if (outputs > 0) {
        self->op.output_parts = self->parts + inputs;
        move_all(self, op->output_parts, self->parts + inputs, outputs);
        self->op.output = tddp_buffers_joined(self->parts + inputs, outputs);
    }
    return TDDP_OK;
}

const tddp_op *tddp_group_staged_op(tddp_work *work)
{
    staged *self = work->staged;
    int64_t left = (self->deadline - tddp_now_ns()) / TDDP_NS_PER_MS;
    self->op.sequence = work->op.sequence;
    self->op.cancel = work->op.cancel;
    self->op.awaited = work->op.awaited;
    self->op.timeout_ms = left > 0 ? left : 1;
    return &self->op;
}

/* --- the steps ------------------------------------------------------------------------------- */

/* All that is needed, and the copies in. On the device. */
static tddp_status begin(tddp_group *group, tddp_work *work, size_t bundled)
{
    staged *self = work->staged;
    const size_t most = bundled > 0 ? bundled : 2 * (size_t)group->world_size;
    tddp_status status = tddp_group_layout_init(&self->layout, most);
    if (status) {
        return status;
    }
    collect(group, work, bundled, &self->layout);
    status = tddp_group_layout_assign(&self->layout, tddp_dtype_size(work->op.input.dtype));
    if (status == TDDP_OK && self->layout.bytes > 0) {
        status = tddp_group_block_pool_acquire(self->block_pool, self->type, self->device,
                                               self->layout.bytes, &self->block);
    }
    if (status == TDDP_OK) {
        status = translate(group, work, self, bundled);
    }
    return status ? status : tddp_group_copies_begin(self, true);
}

static tddp_status create(tddp_group *group, tddp_work *work)
{
    const tddp_op *op = &work->op;
    const tddp_cuda *cuda;
    tddp_status status = tddp_cuda_get(&cuda);
    if (status) {
        return status;
    }
    staged *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    int64_t expiry = atomic_load(&work->expiry);
    int own = atomic_load(&group->staging_device);
    self->cuda = cuda;
    self->type = tddp_group_carried_type(group, op->input.device_type);
    self->device = self->type == TDDP_CPU ? op->input.device_index : own >= 0 ? own : 0;
    self->deadline = expiry > 0 ? expiry : tddp_deadline_after_ms(op->timeout_ms);
    work->staged = self;
    return open_block_pool(group, cuda, &self->block_pool);
}

tddp_status tddp_group_stage_in(tddp_group *group, tddp_work *work)
{
    tddp_status status = work->staged ? TDDP_OK : create(group, work);
    staged *self = work->staged;
    if (status || self->stage >= TDDP_STAGE_READY) {
        return status;
    }
    tddp_cuda_place before;
    status = tddp_cuda_enter(self->cuda, self->device, &before);
    if (status) {
        return status;
    }
    if (self->stage == TDDP_STAGE_FRESH) {
        self->stage = TDDP_STAGE_COPYING_IN;
        status = begin(group, work, work->op.bundled + tddp_group_bundle_count(work->bundle));
    }
    if (status == TDDP_OK) {
        status = tddp_group_copies_await(group, work);
    }
    tddp_cuda_leave(self->cuda, &before);
    if (status == TDDP_OK) {
        self->stage = TDDP_STAGE_READY;
    }
    return status;
}

/* Whether nobody uses the copies any more. What was refused before it began does not; what failed
 * might, in a peer's hands or a device's, until the group's end. */
static bool is_over(const staged *self, tddp_status status)
{
    bool refused = status == TDDP_INVALID_ARGUMENT || status == TDDP_UNSUPPORTED;
    return (status == TDDP_OK || refused) && !self->block->copying;
}

static tddp_status copy_out(tddp_group *group, tddp_work *work)
{
    staged *self = work->staged;
    tddp_cuda_place before;
    tddp_status status = tddp_cuda_enter(self->cuda, self->device, &before);
    if (status) {
        return status;
    }
    if (self->stage == TDDP_STAGE_READY) {
        self->stage = TDDP_STAGE_COPYING_OUT;
        status = tddp_group_copies_begin(self, false);
    }
    if (status == TDDP_OK) {
        status = tddp_group_copies_await(group, work);
    }
    tddp_cuda_leave(self->cuda, &before);
    return status;
}

tddp_status tddp_group_stage_out(tddp_group *group, tddp_work *work, tddp_status status)
{
    staged *self = work->staged;
    if (status == TDDP_OK && self->block) {
        status = copy_out(group, work);
    }
    if (status == TDDP_CANCELED || !self) {
        return status;
    }
    if (self->block) {
        tddp_group_block_pool_return(self->block_pool, self->block, is_over(self, status));
        self->block = NULL;
    }
    if (work->bundle) {
        tddp_group_bundle_use(work->bundle, work->parts);
    }
    work->staged = NULL;
    tddp_group_staged_free(self);
    return status;
}

tddp_status tddp_group_run_staged(tddp_group *group, tddp_work *work, tddp_group_carry carry)
{
    tddp_status status = tddp_group_stage_in(group, work);
    if (status == TDDP_OK && work->staged->stage == TDDP_STAGE_READY) {
        status = carry(group, work, tddp_group_staged_op(work));
    }
    return tddp_group_stage_out(group, work, status);
}
