// Owns the loss over the vocabulary on Hopper: every row of logits is read once and every row of the
// gradient written once. A cluster of up to 16 CTAs holds a pair of rows in shared memory, each CTA a
// slice. Clusters stay and work through consecutive rows; rows with the same teacher row follow each
// other, which is then read once for all of them.
//
// Rows flow through a ring of slots in shared memory in the order of use: [teacher] student student
// [teacher] student ...; a teacher's slice moves from there to a place of its own, where it is kept, as
// probabilities for kl and ce, as logits for other terms. A thread copies (cp.async) exactly the elements
// that it reads itself, and refills a slot as soon as it has taken its elements for the last time, so
// that copies need no barriers and run on while a row is computed. The only exchange is that of the rows'
// maxima and sums: through shared memory in the CTA, then in that of the other CTAs of the cluster, added
// in a fixed order. Sums for the results go to memory by warp and are added by loss_finish.
//
// The exchange is the work of a warp of its own, the messenger. Whoever publishes something to other CTAs
// has to wait until all that it wrote before is in place: for the messenger, the messages; for a thread
// that computes it would be its gradient as well, once a row.
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

enum { THREADS = LOSS_THREADS + WARP }; // the last warp is the messenger

struct exchange {
    union {                                 // by warp
        struct message warp[2][LOSS_WARPS]; // student, teacher
        float warp_sum[LOSS_WARPS][SUM_COUNT];
    };
    struct message mail[2][2][MOST_CTAS]; // turn by turn; student, teacher; from each CTA
    double sum_mail[MOST_CTAS][SUM_COUNT];
    // The messenger's for the others.
    struct loss_softmax student, teacher;
    int32_t label;
    struct loss_gradient gradient;
    double total[SUM_COUNT];
    struct loss_softmax kept; // of the teacher; thread 0's, in the CTA of rank 0
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

// Moves the teacher's slice out of the ring, whose slots are refilled.
template <typename Logit>
static __device__ __forceinline__ struct loss_running
take_teacher(uint32_t teacher, uint32_t *slot, struct feed<Logit> *f, const struct softmax_loss &op,
             const struct place &at, const unsigned char *ring)
{
    struct loss_running r = loss_running_make();
    float x[LOSS_ITEMS];
#pragma unroll 1
    for (int g = 0; g < at.chunks; g++) {
        copy_wait<layout<Logit>::SLOTS - 1>();
        take(x, *slot, f->source);
        teacher_store(teacher + g * TEACHER_STEP, x);
        loss_running_add(&r, x, g);
        feed_chunk(f, *slot, op, at);
        *slot = ring_next<Logit>(*slot, ring);
    }
    teacher_load(x, teacher + r.group * TEACHER_STEP);
    r.item = first_equal(x, r.max);
    return r;
}

// -inf in place of a teacher
static __device__ __forceinline__ void clear_teacher(uint32_t teacher)
{
    const float x[LOSS_ITEMS] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY,
                                 -INFINITY, -INFINITY, -INFINITY, -INFINITY};
    for (int g = 0; g < CHUNKS; g++)
        teacher_store(teacher + g * TEACHER_STEP, x);
}

// Turns the teacher's logits into probabilities. Returns this thread's sum of p (t L - K).
static __device__ __forceinline__ float to_probabilities(uint32_t teacher, const struct place &at,
                                                         float reference, float inverse)
{
    float sum = 0.0f;
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

// One chunk of the student and those after it. By recursion, since the number of copies that may be
// under way is part of the instruction. largest: slot of the first chunk with the maximum.
template <typename Logit, int CHUNK_INDEX>
static __device__ __forceinline__ void see_chunks(struct loss_running *r, uint32_t *largest,
                                                  uint32_t slot, const struct place &at,
                                                  const unsigned char *ring)
{
    if constexpr (CHUNK_INDEX < CHUNKS)
        if (CHUNK_INDEX < at.chunks) {
            float x[LOSS_ITEMS], before = r->max;
            copy_wait<layout<Logit>::SLOTS - 1 - CHUNK_INDEX>();
            take(x, slot, (const Logit *)NULL);
            loss_running_add(r, x, CHUNK_INDEX);
            *largest = r->max > before ? slot : *largest;
            see_chunks<Logit, CHUNK_INDEX + 1>(r, largest, ring_next<Logit>(slot, ring), at, ring);
        }
}

// Statistics of the student's slice, which stays in the ring.
template <typename Logit>
static __device__ __forceinline__ struct loss_running
see_student(uint32_t slot, const struct place &at, const unsigned char *ring)
{
    struct loss_running r = loss_running_make();
    uint32_t largest = slot;
    float x[LOSS_ITEMS];
    see_chunks<Logit, 0>(&r, &largest, slot, at, ring);
    take(x, largest, (const Logit *)NULL);
    r.item = first_equal(x, r.max);
    return r;
}

// Statistics of two rows, each in parts: the student's in lanes 0 to 15, the teacher's in the others. The
// same in all lanes.
static __device__ __forceinline__ void two_rows(struct message part, struct loss_softmax *student,
                                                struct loss_softmax *teacher)
{
    bool first = threadIdx.x % WARP < WARP / 2;
    student->max = warp_max(first ? part.max : -INFINITY);
    teacher->max = warp_max(first ? -INFINITY : part.max);
    float max = first ? student->max : teacher->max;
    int32_t index = part.max == max ? part.argmax : INT32_MAX;
    student->argmax = __reduce_min_sync(0xffffffffu, first ? index : INT32_MAX);
    teacher->argmax = __reduce_min_sync(0xffffffffu, first ? INT32_MAX : index);
    float sum = part.sum * loss_exp2(loss_reference(part.max) - loss_reference(max));
#pragma unroll
    for (int half = WARP / 4; half > 0; half /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, half);
    student->sum = __shfl_sync(0xffffffffu, sum, 0);
    teacher->sum = __shfl_sync(0xffffffffu, sum, WARP / 2);
    student->argmax = student->max == -INFINITY ? 0 : student->argmax;
    teacher->argmax = teacher->max == -INFINITY ? 0 : teacher->argmax;
}

// Statistics of the whole row from those of the warp's elements: of the student's row and of the teacher's.
// Here and in exchange_sums the messenger does its part meanwhile.
static __device__ __forceinline__ void exchange_statistics(struct exchange *x,
                                                           const struct place &at,
                                                           struct loss_softmax *student,
                                                           struct loss_softmax *teacher)
{
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    if (lane == 0) {
        x->warp[0][warp] = {student->max, student->sum, student->argmax, 0};
        x->warp[1][warp] = {teacher->max, teacher->sum, teacher->argmax, 0};
    }
    __syncthreads();
    cluster_pass(at.ctas);
    __syncthreads();
    *student = x->student;
    *teacher = x->teacher;
}

// Sums of all elements of the row, and the gradient's coefficients.
static __device__ __forceinline__ void exchange_sums(struct exchange *x, const struct place &at,
                                                     const float sum[SUM_COUNT])
{
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
#pragma unroll
    for (int i = 0; i < SUM_COUNT; i++) {
        float part = warp_sum(sum[i]);
        if (lane == 0)
            x->warp_sum[warp][i] = part;
    }
    __syncthreads();
    cluster_pass(at.ctas);
    __syncthreads();
}

// The messenger's part, the count-th time: of two mailboxes in turn, since one may be read still when the
// next call writes.
static __device__ __forceinline__ void carry_statistics(struct exchange *x, const struct place &at,
                                                        int count, int32_t label)
{
    static_assert(LOSS_WARPS == WARP / 2, "a half warp takes what the warps have");
    int lane = (int)threadIdx.x % WARP, turn = count % 2;
    int row = lane / (WARP / 2), other = lane % (WARP / 2);
    struct loss_softmax student, teacher;
    __syncthreads();
    two_rows(x->warp[row][other], &student, &teacher);
    struct message own = {student.max, student.sum, student.argmax, 0};
    if (row == 1)
        own = {teacher.max, teacher.sum, teacher.argmax, 0};
    if (other < at.ctas)
        *in_cta(&x->mail[turn][row][at.rank], other, at.rank) = own;
    cluster_exchange(at.ctas);
    struct message part = {-INFINITY, 0.0f, INT32_MAX, 0};
    if (other < at.ctas)
        part = x->mail[turn][row][other];
    two_rows(part, &student, &teacher);
    if (lane == 0) {
        x->student = student;
        x->teacher = teacher;
        x->label = label;
    }
    __syncthreads();
}

// Between two calls the cluster meets in carry_statistics, so that no sum is overwritten before it was read.
static __device__ __forceinline__ void carry_sums(struct exchange *x, const struct softmax_loss &op,
                                                  const struct place &at, int32_t label)
{
    int lane = (int)threadIdx.x % WARP, which = lane / 4, quarter = lane % 4;
    double part = 0.0, total = 0.0;
    __syncthreads();
    for (int i = 0; i < LOSS_WARPS / 4; i++)
        part += (double)x->warp_sum[quarter * (LOSS_WARPS / 4) + i][which];
    part += __shfl_xor_sync(0xffffffffu, part, 1);
    part += __shfl_xor_sync(0xffffffffu, part, 2);
    for (int to = quarter; to < at.ctas; to += 4)
        *in_cta(&x->sum_mail[at.rank][which], to, at.rank) = part;
    cluster_exchange(at.ctas);
    for (int from = quarter; from < at.ctas; from += 4)
        total += x->sum_mail[from][which];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (quarter == 0)
        x->total[which] = total;
    __syncwarp();
    if (lane == 0)
        x->gradient = loss_gradient_of(op, x->total, label);
    __syncthreads();
}

// All that the messenger does for rows [begin, end).
template <bool KL_ONLY>
static __device__ __forceinline__ void
messenger_run(struct exchange *x, const struct softmax_loss &op, const struct place &at,
              int32_t begin, int32_t end)
{
#pragma unroll 1
    for (int32_t r = begin; r < end; r++) {
        int32_t label = op.label[r];
        bug_unless(label < op.vocab);
        carry_statistics(x, at, r - begin, label);
        if (!KL_ONLY)
            carry_sums(x, op, at, label);
    }
}

// Notes the student's logit of a token, where it is this thread's: from the ring, since an index into
// registers would move them to memory.
template <typename Logit>
static __device__ __forceinline__ void note_logit(int32_t item, uint32_t first,
                                                  const unsigned char *ring, float *logit)
{
    typedef layout<Logit> lay;
    if (item < 0)
        return;
    uint32_t slot = first + item / LOSS_ITEMS * lay::SLOT_BYTES;
    if (slot >= shared_address(ring) + lay::SLOTS * lay::SLOT_BYTES)
        slot -= lay::SLOTS * lay::SLOT_BYTES;
    int32_t j = item % LOSS_ITEMS;
    slot += j / lay::UNIT * LOSS_THREADS * 16 + j % lay::UNIT * (int32_t)sizeof(Logit);
    *logit = load((const Logit *)(ring + (slot - shared_address(ring))), 0);
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
static __device__ __forceinline__ void
add_sums(uint32_t teacher, uint32_t slot, const struct place &at, const unsigned char *ring,
         const struct loss_pair &pair, const struct loss_needs &needs, float sum[SUM_COUNT])
{
#pragma unroll 1
    for (int g = 0; g < at.chunks; g++, teacher += TEACHER_STEP) {
        float z[LOSS_ITEMS], t[LOSS_ITEMS];
        take(z, slot, (const Logit *)NULL);
        teacher_load(t, teacher);
#pragma unroll
        for (int j = 0; j < LOSS_ITEMS; j++)
            loss_add(sum, loss_element_of(pair, needs, z[j], t[j]), needs);
        slot = ring_next<Logit>(slot, ring);
    }
}

// Where a CTA of the cluster is in its work.
template <typename Logit> struct work {
    struct feed<Logit> feed;
    uint32_t slot; // the running row's first
    // of the teacher's row
    float reference, sum; // sum: NaN where it has no distribution
    int32_t top_item;     // its argmax, see own_item
    float own_sum;        // this thread's p (t L - K), for kl and ce alone
};

// The last pass over a row of kl and ce: sums and gradient; its slots are refilled.
template <typename Logit, typename Out>
static __device__ __forceinline__ struct loss_part
kl_pass(struct work<Logit> *w, uint32_t teacher, const struct softmax_loss &op,
        const struct place &at, const unsigned char *ring, const struct loss_pair &pair,
        int32_t label, Out *out)
{
    struct loss_part part = {0.0f, 0.0f};
    int32_t label_item = own_item<Logit>(at, label), stored = out != NULL ? at.count : 0;
    uint32_t hit = chunk_bit(w->top_item) | chunk_bit(label_item);
    float ce = op.weight[LOSS_CE_TEACHER] + (label >= 0 ? op.weight[LOSS_CE_DATA] : 0.0f);
#pragma unroll 1
    for (int g = 0; g < at.chunks; g++, teacher += TEACHER_STEP) {
        float z[LOSS_ITEMS], p[LOSS_ITEMS], value[LOSS_ITEMS];
        take(z, w->slot, (const Logit *)NULL);
        teacher_load(p, teacher);
        kl_chunk(z, p, pair, op.weight[LOSS_KL], ce, &part, value);
        if (hit >> g & 1u) {
            hit_target(w->top_item, op.weight[LOSS_CE_TEACHER], g, value);
            hit_target(label_item, op.weight[LOSS_CE_DATA], g, value);
        }
        store_chunk<Logit>(out, stored, g, value);
        feed_chunk(&w->feed, w->slot, op, at);
        w->slot = ring_next<Logit>(w->slot, ring);
    }
    part.kl = w->own_sum - part.kl;
    return part;
}

// The last pass over a row of any mixture: gradient; its slots are refilled.
template <typename Logit, typename Out>
static __device__ __forceinline__ void
general_pass(struct work<Logit> *w, uint32_t teacher, const struct softmax_loss &op,
             const struct place &at, const unsigned char *ring, const struct loss_pair &pair,
             const struct loss_needs &needs, const struct loss_gradient &gradient, int32_t label,
             Out *out)
{
    int32_t label_item = own_item<Logit>(at, label), stored = out != NULL ? at.count : 0;
    uint32_t hit = chunk_bit(w->top_item) | chunk_bit(label_item);
#pragma unroll 1
    for (int g = 0; g < at.chunks; g++, teacher += TEACHER_STEP) {
        float z[LOSS_ITEMS], t[LOSS_ITEMS], value[LOSS_ITEMS];
        take(z, w->slot, (const Logit *)NULL);
        teacher_load(t, teacher);
#pragma unroll
        for (int j = 0; j < LOSS_ITEMS; j++)
            value[j] = loss_gradient_at(gradient, loss_element_of(pair, needs, z[j], t[j]));
        if (hit >> g & 1u) {
            hit_target(w->top_item, op.weight[LOSS_CE_TEACHER], g, value);
            hit_target(label_item, op.weight[LOSS_CE_DATA], g, value);
        }
        store_chunk<Logit>(out, stored, g, value);
        feed_chunk(&w->feed, w->slot, op, at);
        w->slot = ring_next<Logit>(w->slot, ring);
    }
}

// The gradient's coefficients in shared memory and, for the results, the sums.
template <typename Logit>
static __device__ __forceinline__ void
general_gradient(struct work<Logit> *w, uint32_t teacher, const struct place &at,
                 struct exchange *x, const unsigned char *ring, const struct loss_pair &pair,
                 const struct loss_needs &needs, struct loss_record *record)
{
    float sum[SUM_COUNT] = {0.0f};
    add_sums<Logit>(teacher, w->slot, at, ring, pair, needs, sum);
    exchange_sums(x, at, sum);
    if (threadIdx.x < SUM_COUNT && at.rank == 0)
        record->sum[threadIdx.x] = x->total[threadIdx.x];
}

// Reads what is new of row r and exchanges statistics: constants of the pair of rows.
template <typename Logit, bool KL_ONLY>
static __device__ __forceinline__ struct loss_pair
row_begin(struct work<Logit> *w, uint32_t teacher_slice, const struct softmax_loss &op,
          const struct place &at, struct exchange *x, const unsigned char *ring, int32_t r,
          struct loss_record *record)
{
    bool fresh = w->feed.fresh >> r % 32 & 1u;
    struct loss_softmax teacher = {-INFINITY, 0.0f, INT32_MAX};
    struct loss_running known = loss_running_make();
    if (fresh)
        known = take_teacher(teacher_slice, &w->slot, &w->feed, op, at, ring);
    struct loss_running seen = see_student<Logit>(w->slot, at, ring);
    if (fresh)
        teacher = loss_warp(known, index_of<Logit>(at, known.group, known.item));
    struct loss_softmax student = loss_warp(seen, index_of<Logit>(at, seen.group, seen.item));
    exchange_statistics(x, at, &student, &teacher);
    if (fresh) {
        w->reference = loss_reference(teacher.max);
        w->sum = teacher.max == -INFINITY ? NAN : teacher.sum;
        w->top_item = own_item<Logit>(at, teacher.argmax);
        if (KL_ONLY)
            w->own_sum = to_probabilities(teacher_slice, at, w->reference, 1.0f / w->sum);
    }
    if (at.rank == 0 && threadIdx.x == 0) {
        if (fresh)
            x->kept = teacher;
        record->student = student;
        record->teacher = x->kept;
    }
    struct loss_pair pair;
    pair.q_reference = loss_reference(student.max);
    pair.q_inverse = loss_inverse(student);
    pair.p_reference = w->reference;
    pair.p_inverse = 1.0f / w->sum;
    pair.shift = loss_shift(pair, student.sum, w->sum);
    return pair;
}

template <typename Logit, typename Out, bool KL_ONLY>
static __device__ __forceinline__ void
row_run(struct work<Logit> *w, uint32_t teacher_slice, const struct softmax_loss &op,
        const struct place &at, struct exchange *x, const unsigned char *ring, int32_t r,
        const struct output &output)
{
    struct loss_record *record = output.records + r;
    const struct loss_pair pair =
        row_begin<Logit, KL_ONLY>(w, teacher_slice, op, at, x, ring, r, record);
    const int32_t label = x->label;
    note_logit<Logit>(w->top_item, w->slot, ring, &record->top_logit);
    note_logit<Logit>(own_item<Logit>(at, label), w->slot, ring, &record->label_logit);
    Out *out = NULL;
    if (op.gradient != NULL)
        out = (Out *)op.gradient + r * op.gradient_stride + at.begin;
    if (KL_ONLY) {
        struct loss_part part =
            kl_pass<Logit, Out>(w, teacher_slice, op, at, ring, pair, label, out);
        part.overlap = warp_sum(part.overlap);
        part.kl = warp_sum(part.kl);
        if (threadIdx.x % WARP == 0)
            output.parts[(r * at.ctas + at.rank) * LOSS_WARPS + threadIdx.x / WARP] = part;
    } else {
        const struct loss_needs needs = loss_needs_of(op.weight);
        general_gradient(w, teacher_slice, at, x, ring, pair, needs, record);
        general_pass<Logit, Out>(w, teacher_slice, op, at, ring, pair, needs, x->gradient, label,
                                 out);
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

// All that the computing warps do for rows [begin, end).
template <typename Logit, typename Out, bool KL_ONLY>
static __device__ __forceinline__ void rows_run(struct exchange *x, const struct softmax_loss &op,
                                                const struct output &output, const struct place &at,
                                                const unsigned char *ring, uint32_t teacher,
                                                int32_t begin, int32_t end)
{
    struct work<Logit> w;
    w.feed = feed_begin<Logit>(op, at, ring, begin, end);
    w.slot = ring_first(ring);
    w.reference = 0.0f;
    w.sum = 1.0f;
    w.top_item = -1;
    w.own_sum = 0.0f;
#pragma unroll 1
    for (int32_t r = begin; r < end; r++)
        row_run<Logit, Out, KL_ONLY>(&w, teacher, op, at, x, ring, r, output);
}

#endif // sm_90

template <typename Logit, typename Out, bool KL_ONLY>
static __global__ void __launch_bounds__(THREADS, 1)
    cluster_kernel(const __grid_constant__ struct softmax_loss op,
                   const __grid_constant__ struct output output)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    typedef layout<Logit> lay;
    extern __shared__ __align__(128) unsigned char ring[]; // slots, then the teacher's slice
    __shared__ __align__(16) struct exchange x;
    const struct place at = place_make(op);
    // Consecutive rows; no cluster is without one.
    int64_t clusters = gridDim.x / at.ctas, cluster = blockIdx.x / at.ctas;
    int32_t begin = (int32_t)(op.rows * cluster / clusters),
            end = (int32_t)(op.rows * (cluster + 1) / clusters);
    uint32_t teacher = ring_first(ring + lay::SLOTS * lay::SLOT_BYTES);
    bool messenger = threadIdx.x >= LOSS_THREADS;
    if (op.teacher == NULL && !messenger)
        clear_teacher(teacher);
    if (threadIdx.x == 0)
        x.kept = {0.0f, 1.0f, -1};
    cluster_sync(at.ctas); // no CTA writes to one that has not begun
    if (messenger)
        messenger_run<KL_ONLY>(&x, op, at, begin, end);
    else
        rows_run<Logit, Out, KL_ONLY>(&x, op, output, at, ring, teacher, begin, end);
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
