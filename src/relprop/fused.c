/* Fused: elementwise steps of the way back, each in one pass over memory, with their sums on the way.

   Tensors hold `samples` items of `size` floats, one after another in memory; relevance holds `targets` of them. The
   work is cut into `chunks` a sample, for which `sums` has room; what is summed up is left in front of it, and is the
   same for any number of threads. Within a chunk, floats are summed in rows, and the rows in double. */

#include <math.h>
#include <stdint.h>

#define ROW 256

typedef int64_t count;

typedef struct {
    count begin, end;
} span;

static count least(count a, count b) { return a < b ? a : b; }

static span part(count size, count chunks, count chunk)
{
    count rows = (size + ROW - 1) / ROW;
    span found = {rows * chunk / chunks * ROW, least(rows * (chunk + 1) / chunks * ROW, size)};
    return found;
}

/* Leaves the sums over the chunks in front. */
static void gather(double *sums, count wanted, count chunks)
{
    for (count i = 0; i < wanted; i++) {
        double sum = 0;
        for (count chunk = 0; chunk < chunks; chunk++)
            sum += sums[i * chunks + chunk];
        sums[i] = sum;
    }
}

/* By magnitude: x = |a| / (|a| + |b|) r, halves where both are zero, and y = r - x. By value: x = a s and y = b s with
   s = r / (a + b + eps sign(a + b)). Sums of x, y, |x|, |y|, and of what eps takes. */
void split(const float *a, const float *b, const float *r, float *x, float *y, count targets, count samples, count size,
           count chunks, int threads, double *sums, int by_value, float eps)
{
    count kind = targets * samples * chunks;
#pragma omp parallel for collapse(2) num_threads(threads) if (samples * chunks > 1)
    for (count sample = 0; sample < samples; sample++)
        for (count chunk = 0; chunk < chunks; chunk++) {
            span at = part(size, chunks, chunk);
            const float *one = a + sample * size, *two = b + sample * size;
            for (count target = 0; target < targets; target++) {
                count item = target * samples + sample;
                const float *whole = r + item * size;
                float *mine = x + item * size, *rest = y + item * size;
                double *sum = sums + item * chunks + chunk;
                for (int k = 0; k < 5; k++)
                    sum[k * kind] = 0;
                for (count row = at.begin; row < at.end; row += ROW) {
                    float u = 0, v = 0, abs_u = 0, abs_v = 0, taken = 0;
#pragma omp simd reduction(+ : u, v, abs_u, abs_v, taken)
                    for (count i = row; i < least(row + ROW, at.end); i++) {
                        float all = whole[i], share, other;
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
                        mine[i] = share;
                        rest[i] = other;
                        u += share;
                        v += other;
                        abs_u += fabsf(share);
                        abs_v += fabsf(other);
                    }
                    sum[0] += u;
                    sum[kind] += v;
                    sum[2 * kind] += abs_u;
                    sum[3 * kind] += abs_v;
                    sum[4 * kind] += taken;
                }
            }
        }
    gather(sums, 5 * targets * samples, chunks);
}

/* s = r / z, zero where |z| is not above the threshold; sums of how many such places have relevance. */
void divide(const float *r, const float *z, float *s, count targets, count samples, count size, count chunks,
            int threads, double *sums, float threshold)
{
#pragma omp parallel for collapse(2) num_threads(threads) if (samples * chunks > 1)
    for (count sample = 0; sample < samples; sample++)
        for (count chunk = 0; chunk < chunks; chunk++) {
            span at = part(size, chunks, chunk);
            const float *below = z + sample * size;
            for (count target = 0; target < targets; target++) {
                count item = target * samples + sample;
                const float *above = r + item * size;
                float *quotient = s + item * size;
                int lost = 0;
#pragma omp simd reduction(+ : lost)
                for (count i = at.begin; i < at.end; i++) {
                    int dead = fabsf(below[i]) <= threshold;
                    float q = above[i] / below[i];
                    lost += dead && above[i] != 0;
                    quotient[i] = dead ? 0 : q;
                }
                sums[item * chunks + chunk] = lost;
            }
        }
    gather(sums, targets * samples, chunks);
}

/* s = r / (z + eps sign(z)), with an eps for each sample; sums of what eps takes and, if there is a bias for each of
   `channels` neighbours in memory, of s times the bias. */
void steady(const float *r, const float *z, float *s, const float *eps, const float *bias, count channels, count targets,
            count samples, count size, count chunks, int threads, double *sums)
{
    static const float none[ROW];
    count kind = targets * samples * chunks;
#pragma omp parallel for collapse(2) num_threads(threads) if (samples * chunks > 1)
    for (count sample = 0; sample < samples; sample++)
        for (count chunk = 0; chunk < chunks; chunk++) {
            span at = part(size, chunks, chunk);
            for (count target = 0; target < targets; target++) {
                count item = target * samples + sample, length;
                double *sum = sums + item * chunks + chunk;
                sum[0] = sum[kind] = 0;
                for (count row = at.begin; row < at.end; row += length) {
                    count channel = bias ? row % channels : 0;
                    length = least(bias ? least(ROW, channels - channel) : ROW, at.end - row);
                    const float *above = r + item * size + row, *below = z + sample * size + row;
                    const float *shift = bias ? bias + channel : none;
                    float *quotient = s + item * size + row, taken = 0, biased = 0;
#pragma omp simd reduction(+ : taken, biased)
                    for (count i = 0; i < length; i++) {
                        float steady = copysignf(eps[sample], below[i]), q = above[i] / (below[i] + steady);
                        quotient[i] = q;
                        taken += steady * q;
                        biased += shift[i] * q;
                    }
                    sum[0] += taken;
                    sum[kind] += biased;
                }
            }
        }
    gather(sums, 2 * targets * samples, chunks);
}

/* Sums of r and |r|. */
void measure(const float *r, count targets, count samples, count size, count chunks, int threads, double *sums)
{
    count kind = targets * samples * chunks;
#pragma omp parallel for collapse(2) num_threads(threads) if (samples * chunks > 1)
    for (count item = 0; item < targets * samples; item++)
        for (count chunk = 0; chunk < chunks; chunk++) {
            span at = part(size, chunks, chunk);
            double *sum = sums + item * chunks + chunk;
            sum[0] = sum[kind] = 0;
            for (count row = at.begin; row < at.end; row += ROW) {
                float u = 0, abs_u = 0;
#pragma omp simd reduction(+ : u, abs_u)
                for (count i = row; i < least(row + ROW, at.end); i++) {
                    u += r[item * size + i];
                    abs_u += fabsf(r[item * size + i]);
                }
                sum[0] += u;
                sum[kind] += abs_u;
            }
        }
    gather(sums, 2 * targets * samples, chunks);
}

/* r = r a, in place; sums of r and |r|. */
void weigh(float *r, const float *a, count targets, count samples, count size, count chunks, int threads, double *sums)
{
    count kind = targets * samples * chunks;
#pragma omp parallel for collapse(2) num_threads(threads) if (samples * chunks > 1)
    for (count sample = 0; sample < samples; sample++)
        for (count chunk = 0; chunk < chunks; chunk++) {
            span at = part(size, chunks, chunk);
            const float *factor = a + sample * size;
            for (count target = 0; target < targets; target++) {
                count item = target * samples + sample;
                float *product = r + item * size;
                double *sum = sums + item * chunks + chunk;
                sum[0] = sum[kind] = 0;
                for (count row = at.begin; row < at.end; row += ROW) {
                    float u = 0, abs_u = 0;
#pragma omp simd reduction(+ : u, abs_u)
                    for (count i = row; i < least(row + ROW, at.end); i++) {
                        float p = product[i] * factor[i];
                        product[i] = p;
                        u += p;
                        abs_u += fabsf(p);
                    }
                    sum[0] += u;
                    sum[kind] += abs_u;
                }
            }
        }
    gather(sums, 2 * targets * samples, chunks);
}

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
