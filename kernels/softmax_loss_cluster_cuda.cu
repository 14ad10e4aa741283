// Owns the loss over the vocabulary on Hopper: every row of logits is read once and every row of the
// gradient written once. A cluster of up to 8 CTAs holds a pair of rows, each CTA a slice: the student
// in shared memory, the teacher in registers. Clusters stay and work through consecutive rows; rows
// with the same teacher row follow each other, which is then read once for all of them.
//
// Rows flow through a ring of slots in shared memory in the order of use: [teacher] student student
// [teacher] student ... A thread copies (cp.async) exactly the elements that it reads itself, and
// refills a slot as soon as it has taken its elements for the last time, so that copies need no
// barriers and run on while a row is computed. The only exchange is that of the rows' maxima and sums:
// through shared memory in the CTA, then by messages between the CTAs of the cluster, added in order
// of rank. Sums for the results go to memory by warp and are added by loss_finish.
#include "kernels/softmax_loss_cluster.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900

// The stream of chunks into the ring: what comes next. It goes where the oldest chunk was.
template <typename Logit> struct feed {
    const Logit *source;           // this thread's next element
    int32_t left;                  // elements of the slice in chunks that were not copied yet
    int32_t row, end;              // of the cluster
    int32_t teacher, next_teacher; // rows of the teacher: of `row`, of the one after it
    bool is_teacher;               // of the source
    uint32_t fresh;                // bit r % 32: row r has another teacher than the row before
};

// Shared address of this thread's first unit in the ring's first slot.
static __device__ __forceinline__ uint32_t ring_first(const unsigned char *ring)
{
    return shared_address(ring) + threadIdx.x * 16;
}

template <typename Logit>
static __device__ __forceinline__ uint32_t ring_next(uint32_t slot, const unsigned char *ring)
{
    slot += layout<Logit>::SLOT_BYTES;
    bool end = slot >= shared_address(ring) + layout<Logit>::SLOTS * layout<Logit>::SLOT_BYTES;
    return end ? slot - layout<Logit>::SLOTS * layout<Logit>::SLOT_BYTES : slot;
}

// Moves on to the next row: the teacher's of a student row with another teacher, then the student's.
template <typename Logit>
static __device__ __forceinline__ void
feed_row(struct feed<Logit> *f, const struct softmax_loss &op, const struct place &at)
{
    if (f->is_teacher) {
        f->is_teacher = false;
    } else {
        int32_t before = f->teacher;
        f->row++;
        f->teacher = f->next_teacher;
        f->is_teacher = op.teacher != NULL && f->teacher != before;
        uint32_t bit = 1u << f->row % 32;
        f->fresh = f->is_teacher ? f->fresh | bit : f->fresh & ~bit;
        if (op.teacher != NULL && f->row + 1 < f->end)
            f->next_teacher = op.teacher_row[f->row + 1];
    }
    const Logit *rows = (const Logit *)(f->is_teacher ? op.teacher : op.student);
    f->source = rows + (int64_t)(f->is_teacher ? f->teacher : f->row) * op.vocab + at.begin +
                (int32_t)threadIdx.x * layout<Logit>::UNIT;
    f->left = f->row < f->end ? at.chunks : 0;
}

// Starts the copy of the next chunk; an empty one after the last row, so that counts stay the same.
template <typename Logit>
static __device__ __forceinline__ void feed_chunk(struct feed<Logit> *f, uint32_t slot,
                                                  const struct softmax_loss &op,
                                                  const struct place &at)
{
    typedef layout<Logit> lay;
    const int32_t step = LOSS_THREADS * lay::UNIT; // elements from unit to unit
    if (f->left > 1) {
#pragma unroll
        for (int u = 0; u < lay::UNITS; u++)
            copy_unit(slot + u * LOSS_THREADS * 16, f->source + u * step);
        f->source += CHUNK;
        f->left--;
    } else if (f->left == 1) {
        int32_t first = (at.chunks - 1) * CHUNK + (int32_t)threadIdx.x * lay::UNIT;
#pragma unroll
        for (int u = 0; u < lay::UNITS; u++)
            copy_unit(slot + u * LOSS_THREADS * 16,
                      first + u * step < at.count ? f->source + u * step : nothing(f->source));
        feed_row(f, op, at);
    }
    copy_commit();
}

template <typename Logit>
static __device__ __forceinline__ struct feed<Logit>
feed_begin(const struct softmax_loss &op, const struct place &at, const unsigned char *ring,
           int32_t begin, int32_t end) {
    struct feed<Logit> f;
    f.row = begin - 1;
    f.end = end;
    f.teacher = -1;
    f.next_teacher = op.teacher != NULL ? op.teacher_row[begin] : -1;
    f.is_teacher = false;
    f.fresh = 0;
    feed_row(&f, op, at);
    uint32_t slot = ring_first(ring);
#pragma unroll 1
    for (int i = 0; i < layout<Logit>::SLOTS; i++, slot += layout<Logit>::SLOT_BYTES)
        feed_chunk(&f, slot, op, at);
    return f;
}

static __device__ __forceinline__ void
take(float x[LOSS_ITEMS], uint32_t slot, const float *)
{
#pragma unroll
    for (int u = 0; u < 2; u++) {
        uint4 v = load_unit(slot + u * LOSS_THREADS * 16);
        x[4 * u] = __uint_as_float(v.x);
        x[4 * u + 1] = __uint_as_float(v.y);
        x[4 * u + 2] = __uint_as_float(v.z);
        x[4 * u + 3] = __uint_as_float(v.w);
    }
}

static __device__ __forceinline__ void take(float x[LOSS_ITEMS], uint32_t slot, const bf16_t *)
{
    uint4 v = load_unit(slot);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        x[2 * j] = __uint_as_float(words[j] << 16);
        x[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
    }
}

// This thread's element in the row, and the other way round: -1 where it is another thread's.
template <typename Logit>
static __device__ __forceinline__ int32_t index_of(const struct place &at, int chunk, int item)
{
    typedef layout<Logit> lay;
    int32_t unit = item / lay::UNIT, thread = (int32_t)threadIdx.x;
    return at.begin + chunk * CHUNK + (unit * LOSS_THREADS + thread) * lay::UNIT + item % lay::UNIT;
}

template <typename Logit>
static __device__ __forceinline__ int32_t own_item(const struct place &at, int32_t index)
{
    typedef layout<Logit> lay;
    int32_t i = index - at.begin;
    if (index < 0 || i < 0 || i >= at.count)
        return -1;
    int32_t chunk = i / CHUNK, unit = i % CHUNK / lay::UNIT;
    if (unit % LOSS_THREADS != (int32_t)threadIdx.x)
        return -1;
    return chunk * LOSS_ITEMS + unit / LOSS_THREADS * lay::UNIT + i % lay::UNIT;
}

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

// The teacher's slice into registers, its slots refilled.
template <typename Logit>
static __device__ __forceinline__ struct loss_running
take_teacher(float t[CHUNKS][LOSS_ITEMS], uint32_t *slot, struct feed<Logit> *f,
             const struct softmax_loss &op, const struct place &at, const unsigned char *ring)
{
    struct loss_running r = loss_running_make();
#pragma unroll
    for (int g = 0; g < CHUNKS; g++)
        if (g < at.chunks) {
            copy_wait<layout<Logit>::SLOTS - 1>();
            take(t[g], *slot, f->source);
            loss_running_add<true>(&r, t[g], g);
            feed_chunk(f, *slot, op, at);
            *slot = ring_next<Logit>(*slot, ring);
        }
    return r;
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
            loss_running_add<false>(r, x, CHUNK_INDEX);
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

// Statistics of 16 lanes, the same in each of them.
static __device__ __forceinline__ struct loss_softmax half_warp(struct loss_softmax s)
{
    float max = s.max;
    int32_t argmax;
#pragma unroll
    for (int half = WARP / 4; half > 0; half /= 2)
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, half));
    argmax = s.max == max ? s.argmax : INT32_MAX;
    s.sum *= loss_exp2(loss_reference(s.max) - loss_reference(max));
#pragma unroll
    for (int half = WARP / 4; half > 0; half /= 2) {
        s.sum += __shfl_xor_sync(0xffffffffu, s.sum, half);
        argmax = min(argmax, __shfl_xor_sync(0xffffffffu, argmax, half));
    }
    s.max = max;
    s.argmax = argmax;
    return s;
}

// Statistics of the whole row from those of the warp's elements: of the student's row and, with
// `both`, of the teacher's. All threads of all CTAs of the cluster call it, the count-th time.
static __device__ __forceinline__ void exchange_statistics(struct exchange *x,
                                                           const struct place &at, int count,
                                                           bool both, struct loss_softmax *student,
                                                           struct loss_softmax *teacher)
{
    static_assert(LOSS_WARPS == WARP / 2, "a half warp takes what the warps have");
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, turn = count % 2;
    if (lane == 0) {
        x->warp[0][warp] = {student->max, student->sum, student->argmax, 0};
        x->warp[1][warp] = {teacher->max, teacher->sum, teacher->argmax, 0};
    }
    __syncthreads();
    if (warp == 0) {
        int row = lane / LOSS_WARPS, to = lane % LOSS_WARPS;
        struct message own = x->warp[row][to];
        struct loss_softmax s = half_warp({own.max, own.sum, own.argmax});
        if (lane == 0)
            barrier_expect(&x->barrier[turn], at.ctas * (both ? 32 : 16));
        if (to < at.ctas && (row == 0 || both))
            send(&x->mail[turn][row][at.rank], &x->barrier[turn], to, s);
    }
    barrier_wait(&x->barrier[turn], count / 2 % 2);
    *student = loss_combine(x->mail[turn][0], at.ctas);
    if (both)
        *teacher = loss_combine(x->mail[turn][1], at.ctas);
}

// Sums of all elements of the row, complete in the threads of warp 0 of every CTA.
static __device__ __forceinline__ void exchange_sums(struct exchange *x, const struct place &at,
                                                     int count, const float sum[SUM_COUNT],
                                                     double total[SUM_COUNT])
{
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
#pragma unroll
    for (int i = 0; i < SUM_COUNT; i++) {
        float part = warp_sum(sum[i]);
        if (lane == 0)
            x->warp_sum[warp][i] = part;
    }
    __syncthreads();
    if (warp != 0)
        return;
    int which = lane / 4, quarter = lane % 4;
    double part = 0.0;
    for (int i = 0; i < LOSS_WARPS / 4; i++)
        part += (double)x->warp_sum[quarter * (LOSS_WARPS / 4) + i][which];
    part += __shfl_xor_sync(0xffffffffu, part, 1);
    part += __shfl_xor_sync(0xffffffffu, part, 2);
    if (lane == 0)
        barrier_expect(&x->sum_barrier, at.ctas * (int)sizeof(x->sum_mail[0]));
    for (int to = quarter; to < at.ctas; to += 4)
        send(&x->sum_mail[at.rank][which], &x->sum_barrier, to, part);
    barrier_wait(&x->sum_barrier, count % 2);
    for (int i = 0; i < SUM_COUNT; i++) {
        total[i] = 0.0;
        for (int from = 0; from < at.ctas; from++)
            total[i] += x->sum_mail[from][i];
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

// What the gradient of kl and ce is made of.
struct kl_scales {
    float overlap, q, p;
};

// kl and ce alone: the gradient needs no sums, so one pass makes both.
static __device__ __forceinline__ void
kl_chunk(const float z[LOSS_ITEMS], const float t[LOSS_ITEMS], const struct loss_pair &pair,
         const struct kl_scales &scale, struct loss_part *part, float value[LOSS_ITEMS])
{
    float overlap = 0.0f, kl = 0.0f;
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS; j++) {
        float q = loss_power(z[j], pair.q_reference), p = loss_power(t[j], pair.p_reference);
        float d = (t[j] - z[j]) + pair.shift;
        overlap += fminf(q * scale.overlap, p);
        if (p != 0.0f)
            kl = fmaf(p, d, kl);
        // Not fused: exactly 0 where both agree.
        value[j] = __fsub_rn(__fmul_rn(q, scale.q), __fmul_rn(p, scale.p));
    }
    part->overlap += overlap;
    part->kl += kl;
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
add_sums(const float t[CHUNKS][LOSS_ITEMS], uint32_t slot, const struct place &at,
         const unsigned char *ring, const struct loss_pair &pair, const struct loss_needs &needs,
         float sum[SUM_COUNT])
{
#pragma unroll
    for (int g = 0; g < CHUNKS; g++)
        if (g < at.chunks) {
            float z[LOSS_ITEMS];
            take(z, slot, (const Logit *)NULL);
#pragma unroll
            for (int j = 0; j < LOSS_ITEMS; j++)
                loss_add(sum, loss_element_of(pair, needs, z[j], t[g][j]), needs);
            slot = ring_next<Logit>(slot, ring);
        }
}

// Where a CTA of the cluster is in its work.
template <typename Logit> struct work {
    struct feed<Logit> feed;
    uint32_t slot; // the running row's first
    int32_t count; // rows done
    // the teacher in the registers
    float reference, sum; // sum: NaN where it has no distribution
    int32_t top_item;     // its argmax, see own_item
};

// The last pass over a row of kl and ce: sums and gradient; its slots are refilled.
template <typename Logit, typename Out>
static __device__ __forceinline__ struct loss_part
kl_pass(struct work<Logit> *w, const float t[CHUNKS][LOSS_ITEMS], const struct softmax_loss &op,
        const struct place &at, const unsigned char *ring, const struct loss_pair &pair,
        int32_t label, Out *out)
{
    struct loss_part part = {0.0f, 0.0f};
    int32_t label_item = own_item<Logit>(at, label), stored = out != NULL ? at.count : 0;
    uint32_t hit = chunk_bit(w->top_item) | chunk_bit(label_item);
    float ce = op.weight[LOSS_CE_TEACHER] + (label >= 0 ? op.weight[LOSS_CE_DATA] : 0.0f);
    struct kl_scales scale = {pair.q_inverse / pair.p_inverse,
                              (op.weight[LOSS_KL] + ce) * pair.q_inverse,
                              op.weight[LOSS_KL] * pair.p_inverse};
#pragma unroll
    for (int g = 0; g < CHUNKS; g++)
        if (g < at.chunks) {
            float z[LOSS_ITEMS], value[LOSS_ITEMS];
            take(z, w->slot, (const Logit *)NULL);
            kl_chunk(z, t[g], pair, scale, &part, value);
            if (hit >> g & 1u) {
                hit_target(w->top_item, op.weight[LOSS_CE_TEACHER], g, value);
                hit_target(label_item, op.weight[LOSS_CE_DATA], g, value);
            }
            store_chunk<Logit>(out, stored, g, value);
            feed_chunk(&w->feed, w->slot, op, at);
            w->slot = ring_next<Logit>(w->slot, ring);
        }
    part.overlap *= pair.p_inverse;
    part.kl *= pair.p_inverse;
    return part;
}

// The last pass over a row of any mixture: gradient; its slots are refilled.
template <typename Logit, typename Out>
static __device__ __forceinline__ void
general_pass(struct work<Logit> *w, const float t[CHUNKS][LOSS_ITEMS],
             const struct softmax_loss &op, const struct place &at, const unsigned char *ring,
             const struct loss_pair &pair, const struct loss_needs &needs,
             const struct loss_gradient &gradient, int32_t label, Out *out)
{
    int32_t label_item = own_item<Logit>(at, label), stored = out != NULL ? at.count : 0;
    uint32_t hit = chunk_bit(w->top_item) | chunk_bit(label_item);
#pragma unroll
    for (int g = 0; g < CHUNKS; g++)
        if (g < at.chunks) {
            float z[LOSS_ITEMS], value[LOSS_ITEMS];
            take(z, w->slot, (const Logit *)NULL);
#pragma unroll
            for (int j = 0; j < LOSS_ITEMS; j++)
                value[j] = loss_gradient_at(gradient, loss_element_of(pair, needs, z[j], t[g][j]));
            if (hit >> g & 1u) {
                hit_target(w->top_item, op.weight[LOSS_CE_TEACHER], g, value);
                hit_target(label_item, op.weight[LOSS_CE_DATA], g, value);
            }
            store_chunk<Logit>(out, stored, g, value);
            feed_chunk(&w->feed, w->slot, op, at);
            w->slot = ring_next<Logit>(w->slot, ring);
        }
}

// The gradient's coefficients in shared memory and, for the results, the sums, which the other CTAs
// have as well.
template <typename Logit>
static __device__ __forceinline__ void
general_gradient(struct work<Logit> *w, const float t[CHUNKS][LOSS_ITEMS],
                 const struct softmax_loss &op, const struct place &at, struct exchange *x,
                 const unsigned char *ring, const struct loss_pair &pair,
                 const struct loss_needs &needs, int32_t label, struct loss_record *record)
{
    float sum[SUM_COUNT] = {0.0f};
    add_sums<Logit>(t, w->slot, at, ring, pair, needs, sum);
    double total[SUM_COUNT];
    exchange_sums(x, at, w->count, sum, total);
    if (threadIdx.x == 0) {
        x->gradient = loss_gradient_of(op, total, label);
        for (int i = 0; i < SUM_COUNT && at.rank == 0; i++)
            record->sum[i] = total[i];
    }
    __syncthreads();
}

// Reads what is new of row r and exchanges statistics: constants of the pair of rows.
template <typename Logit>
static __device__ __forceinline__ struct loss_pair
row_begin(struct work<Logit> *w, float t[CHUNKS][LOSS_ITEMS], const struct softmax_loss &op,
          const struct place &at, struct exchange *x, const unsigned char *ring, int32_t r,
          struct loss_record *record)
{
    bool fresh = w->feed.fresh >> r % 32 & 1u;
    struct loss_softmax teacher = {0.0f, 1.0f, -1};
    if (fresh) {
        struct loss_running seen = take_teacher(t, &w->slot, &w->feed, op, at, ring);
        teacher = loss_warp(seen, index_of<Logit>(at, seen.group, seen.item));
    }
    struct loss_running seen = see_student<Logit>(w->slot, at, ring);
    struct loss_softmax student = loss_warp(seen, index_of<Logit>(at, seen.group, seen.item));
    exchange_statistics(x, at, w->count, fresh, &student, &teacher);
    if (fresh) {
        w->reference = loss_reference(teacher.max);
        w->sum = teacher.max == -INFINITY ? NAN : teacher.sum;
        w->top_item = own_item<Logit>(at, teacher.argmax);
    }
    if (at.rank == 0 && threadIdx.x == 0) {
        if (fresh)
            x->teacher = teacher;
        record->student = student;
        record->teacher = x->teacher;
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
row_run(struct work<Logit> *w, float t[CHUNKS][LOSS_ITEMS], const struct softmax_loss &op,
        const struct place &at, struct exchange *x, const unsigned char *ring, int32_t r,
        const struct output &output)
{
    int32_t label = op.label[r];
    bug_unless(label < op.vocab);
    struct loss_record *record = output.records + r;
    const struct loss_pair pair = row_begin(w, t, op, at, x, ring, r, record);
    note_logit<Logit>(w->top_item, w->slot, ring, &record->top_logit);
    note_logit<Logit>(own_item<Logit>(at, label), w->slot, ring, &record->label_logit);
    Out *out = NULL;
    if (op.gradient != NULL)
        out = (Out *)op.gradient + r * op.gradient_stride + at.begin;
    if (KL_ONLY) {
        struct loss_part part = kl_pass<Logit, Out>(w, t, op, at, ring, pair, label, out);
        part.overlap = warp_sum(part.overlap);
        part.kl = warp_sum(part.kl);
        if (threadIdx.x % WARP == 0)
            output.parts[(r * at.ctas + at.rank) * LOSS_WARPS + threadIdx.x / WARP] = part;
    } else {
        const struct loss_needs needs = loss_needs_of(op.weight);
        general_gradient(w, t, op, at, x, ring, pair, needs, label, record);
        general_pass<Logit, Out>(w, t, op, at, ring, pair, needs, x->gradient, label, out);
    }
    w->count++;
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

#endif // sm_90

template <typename Logit, typename Out, bool KL_ONLY>
static __global__ void __launch_bounds__(LOSS_THREADS, 1)
    cluster_kernel(const __grid_constant__ struct softmax_loss op,
                   const __grid_constant__ struct output output)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ __align__(16) struct exchange x;
    const struct place at = place_make(op);
    if (threadIdx.x == 0) {
        barrier_init(&x.barrier[0]);
        barrier_init(&x.barrier[1]);
        barrier_init(&x.sum_barrier);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();

    // Consecutive rows; no cluster is without one.
    int64_t clusters = gridDim.x / at.ctas, cluster = blockIdx.x / at.ctas;
    int32_t begin = (int32_t)(op.rows * cluster / clusters),
            end = (int32_t)(op.rows * (cluster + 1) / clusters);
    float t[CHUNKS][LOSS_ITEMS];
#pragma unroll
    for (int g = 0; g < CHUNKS; g++)
#pragma unroll
        for (int j = 0; j < LOSS_ITEMS; j++)
            t[g][j] = -INFINITY;
    struct work<Logit> w;
    w.feed = feed_begin<Logit>(op, at, ring, begin, end);
    w.slot = ring_first(ring);
    w.count = 0;
    w.reference = 0.0f;
    w.sum = 1.0f;
    w.top_item = -1;
    if (threadIdx.x == 0)
        x.teacher = {0.0f, 1.0f, -1};
    for (int32_t r = begin; r < end; r++)
        row_run<Logit, Out, KL_ONLY>(&w, t, op, at, &x, ring, r, output);
    cluster_sync(); // no CTA leaves while others may still write to it
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

// As many clusters of 1, 2, 4 or 8 CTAs, one CTA on an SM, as fit on the GPU at a time.
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
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, RING_BYTES));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = (unsigned)ctas;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)ctas);
    config.blockDim = dim3(LOSS_THREADS);
    config.dynamicSmemBytes = RING_BYTES;
    config.stream = stream->cuda;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cuda_check(cudaOccupancyMaxActiveClusters(&clusters, function, &config));
    if (clusters == 0)
        return false;
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
