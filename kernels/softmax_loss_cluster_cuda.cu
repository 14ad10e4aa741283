// Owns the loss over the vocabulary on Hopper: every row of logits is read once and every row of the
// gradient written once. A cluster of up to 16 CTAs holds a pair of rows in shared memory, each CTA a
// slice. Clusters stay and work through consecutive rows; rows with the same teacher row follow each
// other, which is then read once for all of them.
//
// Rows flow through a ring of slots in shared memory in the order of use: [teacher] student student
// [teacher] student ...; a teacher's slice moves from there to a place of its own, where it is kept, as
// probabilities for kl and ce, as logits for other terms. A warp of its own, the producer, has the copy
// engine fill the slots as soon as the computing warps are done with them, whatever these wait for.
//
// The only exchange is that of the rows' maxima and sums: through shared memory in the CTA, then in that of
// the other CTAs of the cluster, added in a fixed order. Sums for the results go to memory by warp and are
// added by loss_finish. The exchange is the work of another warp, the messenger, and the computing warps
// have something to do meanwhile: with a new teacher, its statistics are exchanged while the student's are
// made, and the student's while the teacher's logits become probabilities; with the teacher of the row
// before, that row is passed over for the last time while the student's are exchanged. CTAs publish
// nothing to each other but words of 8 bytes that say themselves in which turn they were written: a fence
// would wait for all that the thread wrote before.
//
// Loops over a slice are not unrolled: code that no instruction cache holds would take several times as
// long as the work.
#include "kernels/softmax_loss_cuda.cuh"
#include "kernels/softmax_loss_ring.cuh"

struct __align__(16) message
{
    float max, sum;
    int32_t argmax, unused;
};

enum { THREADS = WORKERS + WARP }; // the last warps are the messenger and the producer

enum { STUDENT, TEACHER };

struct exchange {
    union {                                 // by warp
        struct message warp[2][LOSS_WARPS]; // student, teacher
        float warp_sum[LOSS_WARPS][SUM_COUNT];
    };
    // From each CTA; see mail_put.
    uint64_t mail[2][MOST_CTAS][2]; // turn by turn; two words
    uint64_t sum_mail[MOST_CTAS][SUM_COUNT];
    uint64_t barriers[MOST_SLOTS][2];
    uint4 nothing; // -inf
    // The messenger's for the others.
    struct loss_softmax row[2]; // student, teacher
    int32_t label;
    bool fresh; // the next row has another teacher
    struct loss_gradient gradient;
    double total[SUM_COUNT];
};

// Where rows' records and sums go.
struct output {
    struct loss_record *records; // [rows]
    struct loss_part *parts;     // [rows, CTAs, warps]
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900

static __device__ __forceinline__ void store_unit(float *out, const float *x, const float *)
{
    *(float4 *)out = make_float4(x[0], x[1], x[2], x[3]);
}

static __device__ __forceinline__ uint32_t two_bf16(float low, float high)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&pair;
}

static __device__ __forceinline__ void store_unit(bf16_t *out, const float *x, const float *)
{
    *(uint2 *)out = make_uint2(two_bf16(x[0], x[1]), two_bf16(x[2], x[3]));
}

static __device__ __forceinline__ void store_unit(bf16_t *out, const float *x, const bf16_t *)
{
    *(uint4 *)out = make_uint4(two_bf16(x[0], x[1]), two_bf16(x[2], x[3]), two_bf16(x[4], x[5]),
                               two_bf16(x[6], x[7]));
}

// Where a CTA of the cluster is in its work.
struct work {
    struct cursor head; // the first slot that was not read yet
    // of the teacher's row
    float reference, sum; // sum: NaN where it has no distribution
    int32_t top_item;     // its argmax, see own_item
    float own_sum;        // this thread's p (t L - K), for kl and ce alone
};

// A row whose statistics are known.
struct row {
    struct loss_pair pair;
    int32_t label, slot; // slot: of its first chunk
};

// Moves the teacher's slice out of the ring, whose slots are refilled.
template <typename Logit>
static __device__ __forceinline__ struct loss_running take_teacher(struct work *w,
                                                                   const struct place &at)
{
    struct loss_running r = loss_running_make();
    float x[LOSS_ITEMS];
#pragma unroll 1
    for (int g = 0; g < at.chunks; g++) {
        barrier_wait(barrier_full(at, w->head.slot), w->head.phase);
        take<Logit>(x, w->head.slot, g, at);
        slot_release(at, w->head.slot);
        teacher_store(at.teacher + g * TEACHER_STEP, x);
        loss_running_add(&r, x, g);
        cursor_next(&w->head, at);
    }
    teacher_load(x, at.teacher + r.group * TEACHER_STEP);
    r.item = first_equal(x, r.max);
    return r;
}

// -inf in place of a teacher
static __device__ __forceinline__ void clear_teacher(const struct place &at)
{
    const float x[LOSS_ITEMS] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY,
                                 -INFINITY, -INFINITY, -INFINITY, -INFINITY};
    for (int g = 0; g < at.chunks; g++)
        teacher_store(at.teacher + g * TEACHER_STEP, x);
}

// Turns the teacher's logits into probabilities. Returns this thread's sum of p (t L - K).
static __device__ __forceinline__ float to_probabilities(const struct place &at, float reference,
                                                         float inverse)
{
    float sum = 0.0f;
    uint32_t teacher = at.teacher;
#pragma unroll 1
    for (int g = 0; g < at.chunks; g++, teacher += TEACHER_STEP) {
        float x[LOSS_ITEMS], part = 0.0f;
        teacher_load(x, teacher);
#pragma unroll
        for (int j = 0; j < LOSS_ITEMS; j++) {
            float y = fmaf(x[j], LOSS_L, -reference);
            x[j] = loss_exp2(y) * inverse;
            if (x[j] != 0.0f)
                part = fmaf(x[j], y, part);
        }
        teacher_store(teacher, x);
        sum += part;
    }
    return sum;
}

// Statistics of the student's slice, which stays in the ring.
template <typename Logit>
static __device__ __forceinline__ struct loss_running see_student(struct work *w,
                                                                  const struct place &at)
{
    struct loss_running r = loss_running_make();
    int32_t first = w->head.slot;
    float x[LOSS_ITEMS];
#pragma unroll 1
    for (int g = 0; g < at.chunks; g++) {
        barrier_wait(barrier_full(at, w->head.slot), w->head.phase);
        take<Logit>(x, w->head.slot, g, at);
        loss_running_add(&r, x, g);
        cursor_next(&w->head, at);
    }
    take<Logit>(x, slot_after(first, r.group, at), r.group, at);
    r.item = first_equal(x, r.max);
    return r;
}

// Statistics of a row in parts, a lane each; the same in all lanes.
static __device__ __forceinline__ struct loss_softmax one_row(const struct message &part)
{
    struct loss_softmax s;
    s.max = warp_max(part.max);
    s.argmax = __reduce_min_sync(0xffffffffu, part.max == s.max ? part.argmax : INT32_MAX);
    s.sum = warp_sum(part.sum * loss_exp2(loss_reference(part.max) - loss_reference(s.max)));
    s.argmax = s.max == -INFINITY ? 0 : s.argmax;
    return s;
}

// Hands the statistics of the warp's elements, of the student or of the teacher, to the messenger. Those
// handed over before are known then.
template <typename Logit>
static __device__ __forceinline__ void hand_over(struct exchange *x, const struct place &at,
                                                 const struct loss_running &r, int which)
{
    struct loss_softmax s = loss_warp(r, index_of<Logit>(at, r.group, r.item));
    if (threadIdx.x % WARP == 0)
        x->warp[which][threadIdx.x / WARP] = {s.max, s.sum, s.argmax, 0};
    workers_sync();
}

// Sums of all elements of the row, and the gradient's coefficients: the messenger does its part meanwhile.
static __device__ __forceinline__ void exchange_sums(struct exchange *x, const float sum[SUM_COUNT])
{
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
#pragma unroll
    for (int i = 0; i < SUM_COUNT; i++) {
        float part = warp_sum(sum[i]);
        if (lane == 0)
            x->warp_sum[warp][i] = part;
    }
    workers_sync(); // the messenger begins
    workers_sync(); // and is done
}

static __device__ __forceinline__ uint64_t word_of(float high, uint32_t low)
{
    return (uint64_t)__float_as_uint(high) << 32 | low;
}

// The messenger's part, the count-th time: of two mailboxes in turn, since one may be read still when the
// next call writes.
static __device__ __forceinline__ void carry_statistics(struct exchange *x, const struct place &at,
                                                        int count, int which)
{
    int lane = (int)threadIdx.x % WARP, turn = count % 2;
    uint32_t phase = count / 2 % 2;
    const struct message none = {-INFINITY, 0.0f, INT32_MAX, 0};
    workers_sync();
    struct message part = lane < LOSS_WARPS ? x->warp[which][lane] : none;
    struct loss_softmax s = one_row(part);
    part = none;
    if (lane < at.ctas) {
        uint64_t *to = in_cta(x->mail[turn][at.rank], lane, at.rank);
        mail_put(to, word_of(s.max, (uint32_t)s.argmax << 1), phase);
        mail_put(to + 1, word_of(s.sum, 0), phase);
        uint64_t first = mail_take(&x->mail[turn][lane][0], phase),
                 second = mail_take(&x->mail[turn][lane][1], phase);
        part.max = __uint_as_float((uint32_t)(first >> 32));
        part.argmax = (int32_t)((uint32_t)first >> 1);
        part.sum = __uint_as_float((uint32_t)(second >> 32));
    }
    s = one_row(part);
    if (lane == 0)
        x->row[which] = s;
}

// Between two calls the cluster meets in carry_statistics, so that no sum is overwritten before it was read.
static __device__ __forceinline__ void carry_sums(struct exchange *x, const struct softmax_loss &op,
                                                  const struct place &at, uint32_t phase,
                                                  int32_t label)
{
    int lane = (int)threadIdx.x % WARP, which = lane / 4, quarter = lane % 4;
    double part = 0.0, total = 0.0;
    workers_sync();
    for (int i = 0; i < LOSS_WARPS / 4; i++)
        part += (double)x->warp_sum[quarter * (LOSS_WARPS / 4) + i][which];
    part += __shfl_xor_sync(0xffffffffu, part, 1);
    part += __shfl_xor_sync(0xffffffffu, part, 2);
    for (int to = quarter; to < at.ctas; to += 4)
        mail_put(in_cta(&x->sum_mail[at.rank][which], to, at.rank),
                 (uint64_t)__double_as_longlong(part), phase);
    for (int from = quarter; from < at.ctas; from += 4)
        total += __longlong_as_double((long long)mail_take(&x->sum_mail[from][which], phase));
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (quarter == 0)
        x->total[which] = total;
    __syncwarp();
    if (lane == 0)
        x->gradient = loss_gradient_of(op, x->total, label);
    workers_sync();
}

// As if the last message had been one of phase 1.
static __device__ __forceinline__ void mail_open(struct exchange *x)
{
    if (threadIdx.x < 2 * MOST_CTAS * 2)
        (&x->mail[0][0][0])[threadIdx.x] = 1;
    if (threadIdx.x < MOST_CTAS * SUM_COUNT)
        (&x->sum_mail[0][0])[threadIdx.x] = 1;
}

// All that the messenger does for rows [begin, end).
template <bool KL_ONLY>
static __device__ __forceinline__ void
messenger_run(struct exchange *x, const struct softmax_loss &op, const struct place &at,
              int32_t begin, int32_t end)
{
    bool fresh = op.teacher != NULL;
    int count = 0;
#pragma unroll 1
    for (int32_t r = begin; r < end; r++) {
        int32_t label = op.label[r];
        bool next = op.teacher != NULL && r + 1 < end && op.teacher_row[r + 1] != op.teacher_row[r];
        bug_unless(label < op.vocab);
        if (fresh)
            carry_statistics(x, at, count++, TEACHER);
        carry_statistics(x, at, count++, STUDENT);
        if (threadIdx.x % WARP == 0) {
            x->label = label;
            x->fresh = next;
        }
        workers_sync();
        if (!KL_ONLY)
            carry_sums(x, op, at, (r - begin) % 2, label);
        fresh = next;
    }
}

// Notes the student's logit of a token, where it is this thread's: from the ring, since an index into
// registers would move them to memory.
template <typename Logit>
static __device__ __forceinline__ void note_logit(int32_t item, int32_t first,
                                                  const unsigned char *ring, const struct place &at,
                                                  float *logit)
{
    typedef layout<Logit> lay;
    if (item < 0)
        return;
    int32_t j = item % LOSS_ITEMS, slot = slot_after(first, item / LOSS_ITEMS, at);
    int32_t unit = j / lay::UNIT * LOSS_THREADS + (int32_t)threadIdx.x;
    *logit =
        load((const Logit *)(ring + slot * lay::SLOT_BYTES) + unit * lay::UNIT + j % lay::UNIT, 0);
}

// The chunk of an item as a bit, 0 without an item.
static __device__ __forceinline__ uint32_t chunk_bit(int32_t item)
{
    return item < 0 ? 0u : 1u << item / LOSS_ITEMS;
}

// Subtracts a token's target from its gradient, where it is in this chunk of this thread.
static __device__ __forceinline__ void hit_target(int32_t item, float target, int chunk,
                                                  float value[LOSS_ITEMS])
{
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS; j++)
        value[j] -= item == chunk * LOSS_ITEMS + j ? target : 0.0f;
}

// kl and ce alone: the gradient needs no sums, so one pass makes both. part.kl: sum of p (z L - K).
static __device__ __forceinline__ void kl_chunk(const float z[LOSS_ITEMS],
                                                const float p[LOSS_ITEMS],
                                                const struct loss_pair &pair, float kl, float ce,
                                                struct loss_part *part, float value[LOSS_ITEMS])
{
    // Two chains of additions, since one would wait for each.
    float overlap[2] = {0.0f, 0.0f}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS; j++) {
        float y = fmaf(z[j], LOSS_L, -pair.q_reference);
        float q = loss_exp2(y) * pair.q_inverse;
        overlap[j % 2] += fminf(q, p[j]);
        if (p[j] != 0.0f)
            sum[j % 2] = fmaf(p[j], y, sum[j % 2]);
        value[j] = fmaf(kl, q - p[j], ce * q);
    }
    part->overlap += overlap[0] + overlap[1];
    part->kl += sum[0] + sum[1];
}

template <typename Logit, typename Out>
static __device__ __forceinline__ void store_chunk(Out *out, int32_t count, int chunk,
                                                   const float value[LOSS_ITEMS])
{
    typedef layout<Logit> lay;
#pragma unroll
    for (int u = 0; u < lay::UNITS; u++) {
        int32_t i = chunk * CHUNK + (u * LOSS_THREADS + (int32_t)threadIdx.x) * lay::UNIT;
        if (i < count)
            store_unit(out + i, value + u * lay::UNIT, (const Logit *)NULL);
    }
}

template <typename Logit>
static __device__ __forceinline__ void add_sums(const struct row &row, const struct place &at,
                                                const struct loss_needs &needs,
                                                float sum[SUM_COUNT])
{
    int32_t slot = row.slot;
#pragma unroll 1
    for (int g = 0; g < at.chunks; g++) {
        float z[LOSS_ITEMS], t[LOSS_ITEMS];
        take<Logit>(z, slot, g, at);
        teacher_load(t, at.teacher + g * TEACHER_STEP);
#pragma unroll
        for (int j = 0; j < LOSS_ITEMS; j++)
            loss_add(sum, loss_element_of(row.pair, needs, z[j], t[j]), needs);
        slot = slot_after(slot, 1, at);
    }
}

// The last pass over a row of kl and ce: sums and gradient; its slots are refilled.
template <typename Logit, typename Out>
static __device__ __forceinline__ struct loss_part
kl_pass(const struct work &w, const struct row &row, const struct softmax_loss &op,
        const struct place &at, Out *out)
{
    struct loss_part part = {0.0f, 0.0f};
    int32_t label_item = own_item<Logit>(at, row.label), stored = out != NULL ? at.count : 0;
    int32_t slot = row.slot;
    uint32_t hit = chunk_bit(w.top_item) | chunk_bit(label_item);
    float ce = op.weight[LOSS_CE_TEACHER] + (row.label >= 0 ? op.weight[LOSS_CE_DATA] : 0.0f);
#pragma unroll 1
    for (int g = 0; g < at.chunks; g++) {
        float z[LOSS_ITEMS], p[LOSS_ITEMS], value[LOSS_ITEMS];
        take<Logit>(z, slot, g, at);
        slot_release(at, slot);
        teacher_load(p, at.teacher + g * TEACHER_STEP);
        kl_chunk(z, p, row.pair, op.weight[LOSS_KL], ce, &part, value);
        if (hit >> g & 1u) {
            hit_target(w.top_item, op.weight[LOSS_CE_TEACHER], g, value);
            hit_target(label_item, op.weight[LOSS_CE_DATA], g, value);
        }
        store_chunk<Logit>(out, stored, g, value);
        slot = slot_after(slot, 1, at);
    }
    part.kl = w.own_sum - part.kl;
    return part;
}

// The last pass over a row of any mixture: gradient; its slots are refilled.
template <typename Logit, typename Out>
static __device__ __forceinline__ void
general_pass(const struct work &w, const struct row &row, const struct softmax_loss &op,
             const struct place &at, const struct loss_needs &needs,
             const struct loss_gradient &gradient, Out *out)
{
    int32_t label_item = own_item<Logit>(at, row.label), stored = out != NULL ? at.count : 0;
    int32_t slot = row.slot;
    uint32_t hit = chunk_bit(w.top_item) | chunk_bit(label_item);
#pragma unroll 1
    for (int g = 0; g < at.chunks; g++) {
        float z[LOSS_ITEMS], t[LOSS_ITEMS], value[LOSS_ITEMS];
        take<Logit>(z, slot, g, at);
        slot_release(at, slot);
        teacher_load(t, at.teacher + g * TEACHER_STEP);
#pragma unroll
        for (int j = 0; j < LOSS_ITEMS; j++)
            value[j] = loss_gradient_at(gradient, loss_element_of(row.pair, needs, z[j], t[j]));
        if (hit >> g & 1u) {
            hit_target(w.top_item, op.weight[LOSS_CE_TEACHER], g, value);
            hit_target(label_item, op.weight[LOSS_CE_DATA], g, value);
        }
        store_chunk<Logit>(out, stored, g, value);
        slot = slot_after(slot, 1, at);
    }
}

// Reads what is new of the next row and hands its statistics to the messenger: its first slot.
template <typename Logit>
static __device__ __forceinline__ int32_t row_see(struct work *w, const struct place &at,
                                                  struct exchange *x, bool fresh)
{
    if (fresh)
        hand_over<Logit>(x, at, take_teacher<Logit>(w, at), TEACHER);
    int32_t slot = w->head.slot;
    hand_over<Logit>(x, at, see_student<Logit>(w, at), STUDENT);
    return slot;
}

// The teacher's row, whose statistics are known.
template <typename Logit, bool KL_ONLY>
static __device__ __forceinline__ void teacher_begin(struct work *w, const struct place &at,
                                                     const struct loss_softmax &teacher)
{
    w->reference = loss_reference(teacher.max);
    w->sum = teacher.max == -INFINITY ? NAN : teacher.sum;
    w->top_item = own_item<Logit>(at, teacher.argmax);
    if (KL_ONLY)
        w->own_sum = to_probabilities(at, w->reference, 1.0f / w->sum);
}

// Row r once the messenger has its statistics.
static __device__ __forceinline__ struct row row_make(const struct work &w, struct exchange *x,
                                                      const struct place &at, int32_t slot,
                                                      struct loss_record *record)
{
    workers_sync();
    const struct loss_softmax student = x->row[STUDENT];
    if (at.rank == 0 && threadIdx.x == 0) {
        record->student = student;
        record->teacher = x->row[TEACHER];
    }
    struct row row;
    row.label = x->label;
    row.slot = slot;
    row.pair.q_reference = loss_reference(student.max);
    row.pair.q_inverse = loss_inverse(student);
    row.pair.p_reference = w.reference;
    row.pair.p_inverse = 1.0f / w.sum;
    row.pair.shift = loss_shift(row.pair, student.sum, w.sum);
    return row;
}

// Sums and gradient of row r.
template <typename Logit, typename Out, bool KL_ONLY>
static __device__ __forceinline__ void
row_end(const struct work &w, const struct row &row, const struct softmax_loss &op,
        const struct place &at, struct exchange *x, const unsigned char *ring, int32_t r,
        const struct output &output)
{
    struct loss_record *record = output.records + r;
    note_logit<Logit>(w.top_item, row.slot, ring, at, &record->top_logit);
    note_logit<Logit>(own_item<Logit>(at, row.label), row.slot, ring, at, &record->label_logit);
    Out *out = NULL;
    if (op.gradient != NULL)
        out = (Out *)op.gradient + r * op.gradient_stride + at.begin;
    if (KL_ONLY) {
        struct loss_part part = kl_pass<Logit, Out>(w, row, op, at, out);
        part.overlap = warp_sum(part.overlap);
        part.kl = warp_sum(part.kl);
        if (threadIdx.x % WARP == 0)
            output.parts[(r * at.ctas + at.rank) * LOSS_WARPS + threadIdx.x / WARP] = part;
    } else {
        const struct loss_needs needs = loss_needs_of(op.weight);
        float sum[SUM_COUNT] = {0.0f};
        add_sums<Logit>(row, at, needs, sum);
        exchange_sums(x, sum);
        if (threadIdx.x < SUM_COUNT && at.rank == 0)
            record->sum[threadIdx.x] = x->total[threadIdx.x];
        general_pass<Logit, Out>(w, row, op, at, needs, x->gradient, out);
    }
}

static __device__ __forceinline__ struct place place_make(const struct softmax_loss &op)
{
    struct place at;
    at.rank = cluster_rank();
    at.ctas = cluster_size();
    int32_t vocab = (int32_t)op.vocab;
    int32_t slice = ((vocab + at.ctas - 1) / at.ctas + 7) / 8 * 8;
    at.begin = at.rank * slice;
    at.count = min(slice, vocab - at.begin);
    at.chunks = (at.count + CHUNK - 1) / CHUNK;
    return at;
}

// Where the CTA's parts lie in shared memory.
template <typename Logit>
static __device__ __forceinline__ void place_memory(struct place *at, const unsigned char *ring,
                                                    const struct exchange *x)
{
    at->slots = (SHARED_BYTES - at->chunks * TEACHER_STEP) / layout<Logit>::SLOT_BYTES;
    at->ring = shared_address(ring) + threadIdx.x * 16;
    at->teacher = at->ring + at->slots * layout<Logit>::SLOT_BYTES;
    at->nothing = shared_address(&x->nothing);
    at->barriers = shared_address(x->barriers);
}

// All that the computing warps do for rows [begin, end). A row with the teacher of the one before is seen
// before that one's last pass, where the ring has room for both.
template <typename Logit, typename Out, bool KL_ONLY>
static __device__ __forceinline__ void
rows_run(struct exchange *x, const struct softmax_loss &op, const struct output &output,
         const struct place &at, const unsigned char *ring, int32_t begin, int32_t end)
{
    const bool ahead = KL_ONLY && 2 * at.chunks <= at.slots;
    struct work w = {{0, 0}, 0.0f, 1.0f, -1, 0.0f};
    struct row row = {};
    bool fresh = op.teacher != NULL;
#pragma unroll 1
    for (int32_t r = begin; r < end; r++) {
        bool late = r > begin && ahead && !fresh;
        if (r > begin && !late)
            row_end<Logit, Out, KL_ONLY>(w, row, op, at, x, ring, r - 1, output);
        int32_t slot = row_see<Logit>(&w, at, x, fresh);
        if (late)
            row_end<Logit, Out, KL_ONLY>(w, row, op, at, x, ring, r - 1, output);
        if (fresh)
            teacher_begin<Logit, KL_ONLY>(&w, at, x->row[TEACHER]);
        row = row_make(w, x, at, slot, output.records + r);
        fresh = x->fresh;
    }
    row_end<Logit, Out, KL_ONLY>(w, row, op, at, x, ring, end - 1, output);
}

// All threads, before the cluster meets.
template <typename Logit>
static __device__ __forceinline__ void memory_open(struct exchange *x, const struct place &at,
                                                   bool teacher)
{
    const uint32_t none = sizeof(Logit) == 4 ? 0xff800000u : 0xff80ff80u; // -inf
    if (!teacher && threadIdx.x < LOSS_THREADS)
        clear_teacher(at);
    mail_open(x);
    if (threadIdx.x == 0) {
        x->row[TEACHER] = {0.0f, 1.0f, -1};
        x->nothing = make_uint4(none, none, none, none);
        ring_open(at);
    }
}

#endif // sm_90

template <typename Logit, typename Out, bool KL_ONLY>
static __global__ void __launch_bounds__(THREADS, 1)
    cluster_kernel(const __grid_constant__ struct softmax_loss op,
                   const __grid_constant__ struct output output)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    extern __shared__ __align__(128) unsigned char ring[]; // slots, then the teacher's slice
    __shared__ __align__(16) struct exchange x;
    struct place at = place_make(op);
    place_memory<Logit>(&at, ring, &x);
    // Consecutive rows; no cluster is without one.
    int64_t clusters = gridDim.x / at.ctas, cluster = blockIdx.x / at.ctas;
    int32_t begin = (int32_t)(op.rows * cluster / clusters),
            end = (int32_t)(op.rows * (cluster + 1) / clusters);
    memory_open<Logit>(&x, at, op.teacher != NULL);
    cluster_sync(at.ctas); // no CTA writes to one that has not begun
    if (threadIdx.x < LOSS_THREADS)
        rows_run<Logit, Out, KL_ONLY>(&x, op, output, at, ring, begin, end);
    else if (threadIdx.x < WORKERS)
        messenger_run<KL_ONLY>(&x, op, at, begin, end);
    else if (threadIdx.x == WORKERS)
        feed_run<Logit>(op, at, shared_address(ring), begin, end);
    __syncwarp();
    cluster_sync(at.ctas); // no CTA leaves while others may still write to it
#endif
}

typedef void cluster_fn(struct softmax_loss, struct output);

// The instance for this call, NULL where there is none.
template <bool KL_ONLY> cluster_fn *cluster_function(const struct softmax_loss *op)
{
    bool gradient = op->gradient == NULL || is_bf16(op->gradient_type);
    if (is_bf16(op->logits_type))
        return gradient ? cluster_kernel<bf16_t, bf16_t, KL_ONLY> : NULL;
    return gradient ? cluster_kernel<float, bf16_t, KL_ONLY>
                    : cluster_kernel<float, float, KL_ONLY>;
}

// Units of 16 bytes of logits must be whole, and so must what they become in the gradient.
bool is_aligned(const struct softmax_loss *op)
{
    size_t size = dtype_size(op->logits_type), row = (size_t)op->vocab * size;
    if (((uintptr_t)op->student | (uintptr_t)op->teacher | row) % 16 != 0)
        return false;
    if (op->gradient == NULL)
        return true;
    size_t out = dtype_size(op->gradient_type), unit = 16 / size * out;
    return ((uintptr_t)op->gradient | (size_t)op->gradient_stride * out) % unit == 0;
}

int ctas_for(int64_t vocab)
{
    int ctas = 1;
    while ((int64_t)ctas * CHUNKS * CHUNK < vocab)
        ctas *= 2;
    return ctas;
}

// As many clusters of 1 to 16 CTAs, one CTA on an SM, as fit on the GPU at a time.
bool loss_cluster(struct stream *stream, const struct softmax_loss *op)
{
    int ctas = ctas_for(op->vocab), clusters = 0;
    if (stream->generic || op->vocab < LEAST_VOCAB || ctas > MOST_CTAS || !is_aligned(op))
        return false;
    struct loss_needs needs = loss_needs_of(op->weight);
    bool kl_only = op->teacher != NULL && !loss_needs_sums(needs);
    cluster_fn *function = kl_only ? cluster_function<true>(op) : cluster_function<false>(op);
    if (function == NULL)
        return false;
    cuda_check(
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    cuda_check(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = (unsigned)ctas;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)ctas);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = stream->cuda;
    config.attrs = &attribute;
    config.numAttrs = 1;
    // A GPU may have no room for the largest clusters.
    if (cudaOccupancyMaxActiveClusters(&clusters, function, &config) != cudaSuccess ||
        clusters == 0) {
        (void)cudaGetLastError();
        return false;
    }
    if (clusters > op->rows)
        clusters = (int)op->rows;
    config.gridDim.x = (unsigned)(clusters * ctas);
    struct output output;
    output.records = (struct loss_record *)stream->workspace;
    output.parts = (struct loss_part *)(output.records + op->rows);
    cuda_check(cudaLaunchKernelEx(&config, function, *op, output));
    loss_finish(stream, op, output.records, output.parts, kl_only ? ctas * LOSS_WARPS : 0);
    return true;
}
