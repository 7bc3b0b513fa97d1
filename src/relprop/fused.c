/* Fused: elementwise steps of the way back, each in one pass over memory, with their sums on the way.

   Tensors hold `samples` items of `size` floats, one after another in memory; relevance holds `targets` of them. The
   work is cut into `chunks` a sample, for which `sums` has room; what is summed up is left in front of it, and is the
   same for any number of threads. Within a chunk, floats are summed in rows, and the rows in double. */

#include <math.h>
#include <stdint.h>

#define ROW 256
#define KINDS 7
#define INLINE static inline __attribute__((always_inline))

typedef int64_t count;

/* What a step reads and writes. Relevance R is r where there is no factor; with one, it is a product that has not been
   taken yet, c a, or r + c a where there is r. Values one and two, results x and y. */
typedef struct {
    const float *r, *c, *a, *one, *two;
    float *x, *y;
    const float *eps, *bias; /* for each sample; for each of `channels` that are neighbours in memory, or none */
    double *sums;
    count channels, targets, samples, size, chunks;
    float threshold;
    int threads;
} work;

/* Some neighbours: where they are in relevance and in values, and how many. A step adds their sums, of c a and |c a|
   first. */
typedef void step(const work *w, count at, count from, count length, double *sum);

static count least(count a, count b) { return a < b ? a : b; }

static void each(const work *w, step *take, int kinds)
{
    count items = w->targets * w->samples, rows = (w->size + ROW - 1) / ROW;
#pragma omp parallel for collapse(2) num_threads(w->threads) if (w->samples * w->chunks > 1)
    for (count sample = 0; sample < w->samples; sample++)
        for (count chunk = 0; chunk < w->chunks; chunk++) {
            count begin = rows * chunk / w->chunks * ROW;
            count end = least(rows * (chunk + 1) / w->chunks * ROW, w->size);
            for (count target = 0; target < w->targets; target++) {
                count item = target * w->samples + sample, length;
                double sum[KINDS] = {0};
                for (count row = begin; row < end; row += length) {
                    count beside = w->bias ? w->channels - row % w->channels : ROW;
                    length = least(least(ROW, beside), end - row);
                    take(w, item * w->size + row, sample * w->size + row, length, sum);
                }
                for (int kind = 0; kind < kinds; kind++)
                    w->sums[(kind * items + item) * w->chunks + chunk] = sum[kind];
            }
        }
    for (count i = 0; i < kinds * items; i++) {
        double all = 0;
        for (count chunk = 0; chunk < w->chunks; chunk++)
            all += w->sums[i * w->chunks + chunk];
        w->sums[i] = all;
    }
}

/* The ways in which relevance comes. A step for any of them is compiled for each, so that its loops have no branches. */
enum { WHOLE, PRODUCT, BOTH };

#define ANY_WAY(name, kinds)                                                                                           \
    static void name##_row(const work *w, count at, count from, count length, double *sum)                             \
    {                                                                                                                  \
        if (!w->a)                                                                                                     \
            name##_by(WHOLE, w, at, from, length, sum);                                                                \
        else if (!w->r)                                                                                                \
            name##_by(PRODUCT, w, at, from, length, sum);                                                              \
        else                                                                                                           \
            name##_by(BOTH, w, at, from, length, sum);                                                                 \
    }                                                                                                                  \
    void name(const work *w) { each(w, name##_row, kinds); }

/* Declares what a step needs of relevance, and R at a place, whose product p is summed up. */
#define RELEVANCE                                                                                                      \
    const float *r = w->r + at, *c = w->c + at, *a = w->a + from;                                                      \
    float u = 0, abs_u = 0;
#define TAKE(R)                                                                                                        \
    float p = way == WHOLE ? 0 : c[i] * a[i], R = way == WHOLE ? r[i] : way == PRODUCT ? p : r[i] + p;                 \
    u += p;                                                                                                            \
    abs_u += fabsf(p);
#define TAKEN                                                                                                          \
    sum[0] += u;                                                                                                       \
    sum[1] += abs_u;

/* x = |one| / (|one| + |two|) R, halves where both are zero, and y = R - x; or, by value, x = one s and y = two s with
   s = R / (one + two + eps sign(one + two)). Sums of x, y, |x|, |y|, and of what eps takes. */
INLINE void split_by(int way, int by_value, const work *w, count at, count from, count length, double *sum)
{
    RELEVANCE
    const float *one = w->one + from, *two = w->two + from, eps = w->threshold;
    float *x = w->x + at, *y = w->y + at, v = 0, z = 0, abs_v = 0, abs_z = 0, taken = 0;
#pragma omp simd reduction(+ : u, abs_u, v, z, abs_v, abs_z, taken)
    for (count i = 0; i < length; i++) {
        TAKE(all)
        float share, other;
        if (by_value) {
            float both = one[i] + two[i], steady = copysignf(eps, both), s = all / (both + steady);
            share = one[i] * s;
            other = two[i] * s;
            taken += steady * s;
        } else {
            float weight = fabsf(one[i]), both = weight + fabsf(two[i]);
            share = both == 0 ? 0.5f * all : weight / both * all;
            other = all - share;
        }
        x[i] = share;
        y[i] = other;
        v += share;
        z += other;
        abs_v += fabsf(share);
        abs_z += fabsf(other);
    }
    TAKEN
    sum[2] += v;
    sum[3] += z;
    sum[4] += abs_v;
    sum[5] += abs_z;
    sum[6] += taken;
}

INLINE void split_by_magnitude_by(int way, const work *w, count at, count from, count length, double *sum)
{
    split_by(way, 0, w, at, from, length, sum);
}

INLINE void split_by_value_by(int way, const work *w, count at, count from, count length, double *sum)
{
    split_by(way, 1, w, at, from, length, sum);
}

/* x = R / one, zero where |one| is not above the threshold; sums of how many such places have relevance. */
INLINE void divide_by(int way, const work *w, count at, count from, count length, double *sum)
{
    RELEVANCE
    const float *below = w->one + from, threshold = w->threshold;
    float *x = w->x + at;
    int lost = 0;
#pragma omp simd reduction(+ : u, abs_u, lost)
    for (count i = 0; i < length; i++) {
        TAKE(above)
        int dead = fabsf(below[i]) <= threshold;
        float q = above / below[i];
        lost += dead && above != 0;
        x[i] = dead ? 0 : q;
    }
    TAKEN
    sum[2] += lost;
}

/* x = R / (one + eps sign(one)); sums of what eps takes, and of x times the bias. */
INLINE void steady_by(int way, const work *w, count at, count from, count length, double *sum)
{
    static const float none[ROW];
    RELEVANCE
    const float *below = w->one + from, *bias = w->bias ? w->bias + from % w->channels : none;
    const float eps = w->eps[from / w->size];
    float *x = w->x + at, taken = 0, biased = 0;
#pragma omp simd reduction(+ : u, abs_u, taken, biased)
    for (count i = 0; i < length; i++) {
        TAKE(above)
        float steady = copysignf(eps, below[i]), q = above / (below[i] + steady);
        x[i] = q;
        taken += steady * q;
        biased += bias[i] * q;
    }
    TAKEN
    sum[2] += taken;
    sum[3] += biased;
}

/* x = R. */
INLINE void weigh_by(int way, const work *w, count at, count from, count length, double *sum)
{
    RELEVANCE
    float *x = w->x + at;
#pragma omp simd reduction(+ : u, abs_u)
    for (count i = 0; i < length; i++) {
        TAKE(all)
        x[i] = all;
    }
    TAKEN
}

ANY_WAY(split_by_magnitude, 7)
ANY_WAY(split_by_value, 7)
ANY_WAY(divide, 3)
ANY_WAY(steady, 4)
ANY_WAY(weigh, 2)

/* Sums of r and |r|. */
static void measure_row(const work *w, count at, count from, count length, double *sum)
{
    const float *r = w->r + at;
    float u = 0, abs_u = 0;
#pragma omp simd reduction(+ : u, abs_u)
    for (count i = 0; i < length; i++) {
        u += r[i];
        abs_u += fabsf(r[i]);
    }
    TAKEN
}

void measure(const work *w) { each(w, measure_row, 2); }

/* Hands the relevance r of a max pool's windows to the largest of their inputs a, evenly among those that equal the
   output y: x. s has room for as much as r. The channels of a place are neighbours in memory, and places on two axes
   have sizes of input and output, and the kernel, stride, padding and dilation of the windows: pairs, in this order. */
void winners(const float *a, const float *y, const float *r, float *s, float *x, count targets, count samples,
             count channels, const count *pairs, int threads)
{
    const count *in = pairs, *out = pairs + 2, *kernel = pairs + 4, *stride = pairs + 6, *before = pairs + 8,
                *apart = pairs + 10;
    count above = samples * out[0] * out[1] * channels, below = samples * in[0] * in[1] * channels;
#pragma omp parallel for collapse(2) num_threads(threads)
    for (count sample = 0; sample < samples; sample++)
        for (count row = 0; row < out[0]; row++)
            for (count column = 0; column < out[1]; column++)
                for (count begin = 0; begin < channels; begin += ROW) {
                    count length = least(ROW, channels - begin);
                    count at = ((sample * out[0] + row) * out[1] + column) * channels + begin;
                    float ties[ROW] = {0};
                    for (count k = 0; k < kernel[0] * kernel[1]; k++) {
                        count i = row * stride[0] - before[0] + k / kernel[1] * apart[0];
                        count j = column * stride[1] - before[1] + k % kernel[1] * apart[1];
                        if (i < 0 || i >= in[0] || j < 0 || j >= in[1])
                            continue;
                        const float *one = a + ((sample * in[0] + i) * in[1] + j) * channels + begin;
                        for (count c = 0; c < length; c++)
                            ties[c] += one[c] == y[at + c] ? 1.0f : 0.0f;
                    }
                    for (count target = 0; target < targets; target++)
                        for (count c = 0; c < length; c++)
                            s[target * above + at + c] = r[target * above + at + c] / ties[c];
                }
#pragma omp parallel for collapse(2) num_threads(threads)
    for (count sample = 0; sample < samples; sample++)
        for (count row = 0; row < in[0]; row++)
            for (count column = 0; column < in[1]; column++)
                for (count target = 0; target < targets; target++) {
                    count at = ((sample * in[0] + row) * in[1] + column) * channels;
                    const float *one = a + at;
                    float *sum = x + target * below + at;
                    for (count c = 0; c < channels; c++)
                        sum[c] = 0;
                    for (count k = 0; k < kernel[0] * kernel[1]; k++) {
                        count i = row + before[0] - k / kernel[1] * apart[0];
                        count j = column + before[1] - k % kernel[1] * apart[1];
                        if (i < 0 || j < 0 || i % stride[0] || j % stride[1] || i / stride[0] >= out[0] ||
                            j / stride[1] >= out[1])
                            continue;
                        count from = ((sample * out[0] + i / stride[0]) * out[1] + j / stride[1]) * channels;
                        const float *largest = y + from, *share = s + target * above + from;
#pragma omp simd
                        for (count c = 0; c < channels; c++)
                            sum[c] += one[c] == largest[c] ? share[c] : 0.0f;
                    }
                }
}
