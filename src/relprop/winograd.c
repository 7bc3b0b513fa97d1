/* Winograd: convolutions of three by three with fewer products, F(2x2, 3x3) of Lavin and Gray (2016).

   A tile of two by two outputs sees four by four inputs d. With the turned kernel g as u = G g G', it is

       y = A' (sum over channels of u * (B' d B)) A,

   16 products where there were 36. The sums over channels are 16 products of matrices, of some tiles with all outputs.
   An output depends on its own window alone, so where that is zero, it is exactly zero too. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 14 /* as many tiles as there are registers for */
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define ROWS 6
#else
#define LANES 0
#endif

const int lanes = LANES;

#if LANES

#include <immintrin.h>

#define WIDE (2 * LANES) /* outputs that are computed at a time */
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef int64_t count;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t mask __attribute__((vector_size(4 * LANES)));

#if LANES == 16
#define FMA(x, y, sum) ((vec)_mm512_fmadd_ps((__m512)(x), (__m512)(y), (__m512)(sum)))
#define EVERY(x) ((vec)_mm512_set1_ps(x))
#define BELOW(x, y) ((unsigned)_mm512_cmp_ps_mask((__m512)(x), (__m512)(y), _CMP_LT_OQ)) /* a bit for each lane */
#else
#define FMA(x, y, sum) ((vec)_mm256_fmadd_ps((__m256)(x), (__m256)(y), (__m256)(sum)))
#define EVERY(x) ((vec)_mm256_set1_ps(x))
#define BELOW(x, y) ((unsigned)_mm256_movemask_ps(_mm256_cmp_ps((__m256)(x), (__m256)(y), _CMP_LT_OQ)))
#endif

/* A convolution of images whose channels are neighbours in memory. Kernels lie as [outputs / WIDE][16][in][WIDE], and
   for single outputs as they are, with strides of outputs, inputs and taps. Where an output is smaller than `least`
   times what it is made of, cancellation has left few of its digits, and it is computed anew from its own window. */
typedef struct {
    const float *a, *kernel, *bias, *weight;
    float *y, *room;
    count samples, in, out, height, width, down, across, blocks, by_output, by_input, by_tap;
    float least;
    int relu, threads;
} task;

static count high(const task *t) { return t->height + 2 * t->down - 2; }
static count broad(const task *t) { return t->width + 2 * t->across - 2; }
static count tiles_of(const task *t) { return t->samples * ((high(t) + 1) / 2) * ((broad(t) + 1) / 2); }
static count groups(const task *t) { return (tiles_of(t) + ROWS - 1) / ROWS; }
static count most(const task *t) { return (groups(t) + t->blocks - 1) / t->blocks * ROWS; }

/* How many floats of room a thread needs. */
count winograd_room(const task *t) { return 16 * most(t) * (t->in + WIDE) + t->in; }

/* Which of four by four inputs a tile begins with. */
typedef struct {
    count sample, row, column;
} place;

static place place_of(const task *t, count tile)
{
    count across = (broad(t) + 1) / 2, each = (high(t) + 1) / 2 * across;
    return (place){tile / each, tile % each / across * 2, tile % across * 2};
}

static place next(const task *t, place at)
{
    at.column += 2;
    if (at.column >= broad(t)) {
        at.column = 0;
        at.row += 2;
    }
    if (at.row >= high(t)) {
        at.row = 0;
        at.sample++;
    }
    return at;
}

/* An input's channels, or NULL for padding. */
static const float *input(const task *t, count sample, count row, count column)
{
    row -= t->down;
    column -= t->across;
    if (row < 0 || row >= t->height || column < 0 || column >= t->width)
        return NULL;
    return t->a + ((sample * t->height + row) * t->width + column) * t->in;
}

/* B' d B of a tile, for each of 16 places `apart`; channels lie in rows of LANES, ROWS of which are neighbours. */
static void transform(const task *t, place at, const float *none, float *v, count apart)
{
    const float *d[4][4];
    for (int p = 0; p < 4; p++)
        for (int q = 0; q < 4; q++) {
            const float *one = input(t, at.sample, at.row + p, at.column + q);
            d[p][q] = one ? one : none;
        }
    for (count c = 0; c < t->in; c += LANES, v += ROWS * LANES) {
        vec e[4][4];
        UNROLL for (int q = 0; q < 4; q++) {
            vec d0 = *(const loose *)(d[0][q] + c), d1 = *(const loose *)(d[1][q] + c);
            vec d2 = *(const loose *)(d[2][q] + c), d3 = *(const loose *)(d[3][q] + c);
            e[0][q] = d0 - d2;
            e[1][q] = d1 + d2;
            e[2][q] = d2 - d1;
            e[3][q] = d1 - d3;
        }
        UNROLL for (int p = 0; p < 4; p++) {
            *(vec *)(v + 4 * p * apart) = e[p][0] - e[p][2];
            *(vec *)(v + (4 * p + 1) * apart) = e[p][1] + e[p][2];
            *(vec *)(v + (4 * p + 2) * apart) = e[p][2] - e[p][1];
            *(vec *)(v + (4 * p + 3) * apart) = e[p][1] - e[p][3];
        }
    }
}

INLINE void multiply_rows(int rows, const float *v, const float *kernel, count in, float *m)
{
    vec sum[ROWS][2];
    UNROLL for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = EVERY(0);
    for (count k = 0; k < in; k += LANES, v += ROWS * LANES)
        for (int lane = 0; lane < LANES; lane++, kernel += WIDE) {
            vec one = *(const loose *)kernel, two = *(const loose *)(kernel + LANES);
            UNROLL for (int i = 0; i < rows; i++) {
                vec x = EVERY(v[i * LANES + lane]);
                sum[i][0] = FMA(x, one, sum[i][0]);
                sum[i][1] = FMA(x, two, sum[i][1]);
            }
        }
    UNROLL for (int i = 0; i < rows; i++) {
        *(vec *)(m + i * WIDE) = sum[i][0];
        *(vec *)(m + i * WIDE + LANES) = sum[i][1];
    }
}

/* The product of some tiles with WIDE outputs, at one of the 16 places; what follows the last tile is of no concern. */
static void multiply(count tiles, const float *v, const float *kernel, count in, float *m)
{
    for (; tiles >= ROWS; tiles -= ROWS, v += ROWS * in, m += ROWS * WIDE)
        multiply_rows(ROWS, v, kernel, in, m);
    if (tiles > ROWS / 2)
        multiply_rows(ROWS, v, kernel, in, m);
    else if (tiles)
        multiply_rows(ROWS / 2, v, kernel, in, m);
}

/* One output, from its own window. */
static float direct(const task *t, count sample, count row, count column, count output)
{
    float sum = 0;
    for (int tap = 0; tap < 9; tap++) {
        const float *one = input(t, sample, row + tap / 3, column + tap % 3);
        const float *weight = t->weight + output * t->by_output + tap * t->by_tap;
        for (count c = 0; one && c < t->in; c++)
            sum += one[c] * weight[c * t->by_input];
    }
    return sum;
}

INLINE vec magnitude(vec v) { return (vec)((mask)v & 0x7fffffff); }

/* A' m A of a tile and LANES outputs from `output` on. */
INLINE void finish(int exact, const task *t, place at, const float *m, count apart, count output)
{
    count rows = high(t), columns = broad(t);
    vec f[2][4], size[2][4], bias = EVERY(0);
    if (t->bias)
        bias = *(const loose *)(t->bias + output);
    UNROLL for (int q = 0; q < 4; q++) {
        vec m0 = *(const vec *)(m + q * apart), m1 = *(const vec *)(m + (4 + q) * apart);
        vec m2 = *(const vec *)(m + (8 + q) * apart), m3 = *(const vec *)(m + (12 + q) * apart);
        f[0][q] = m0 + m1 + m2;
        f[1][q] = m1 - m2 - m3;
        if (exact) {
            vec both = magnitude(m1) + magnitude(m2);
            size[0][q] = both + magnitude(m0);
            size[1][q] = both + magnitude(m3);
        }
    }
    UNROLL for (int p = 0; p < 2; p++)
        UNROLL for (int q = 0; q < 2; q++) {
            count row = at.row + p, column = at.column + q;
            if (row >= rows || column >= columns)
                continue;
            vec z = q ? f[p][1] - f[p][2] - f[p][3] : f[p][0] + f[p][1] + f[p][2];
            if (exact) {
                vec whole = size[p][1] + size[p][2] + (q ? size[p][3] : size[p][0]);
                for (unsigned small = BELOW(magnitude(z), t->least * whole); small; small &= small - 1) {
                    int lane = __builtin_ctz(small);
                    z[lane] = direct(t, at.sample, row, column, output + lane);
                }
            }
            z += bias;
            if (t->relu)
                z = (vec)((mask)z & ~(z < EVERY(0))); /* what is no number stays none */
            *(loose *)(t->y + ((at.sample * rows + row) * columns + column) * t->out + output) = z;
        }
}

/* Convolves. Tiles are taken in blocks whose 16 matrices stay in a processor's cache. */
void winograd(const task *t)
{
    count tiles = tiles_of(t), panel = most(t) * t->in, sheet = most(t) * WIDE;
#pragma omp parallel for schedule(dynamic, 1) num_threads(t->threads)
    for (count block = 0; block < t->blocks; block++) {
        extern int omp_get_thread_num(void);
        float *v = t->room + winograd_room(t) * omp_get_thread_num(), *m = v + 16 * panel, *none = m + 16 * sheet;
        count first = groups(t) * block / t->blocks * ROWS, end = groups(t) * (block + 1) / t->blocks * ROWS;
        count number = (end < tiles ? end : tiles) - first;
        memset(none, 0, t->in * sizeof *none);
        place begin = place_of(t, first), at = begin;
        for (count i = 0; i < number; i++, at = next(t, at))
            transform(t, at, none, v + i / ROWS * ROWS * t->in + i % ROWS * LANES, panel);
        for (count output = 0; output < t->out; output += WIDE) {
            for (count k = 0; k < 16; k++)
                multiply(number, v + k * panel, t->kernel + (output * 16 + k * WIDE) * t->in, t->in, m + k * sheet);
            at = begin;
            for (count i = 0; i < number; i++, at = next(t, at))
                for (int half = 0; half < WIDE; half += LANES)
                    if (t->least > 0)
                        finish(1, t, at, m + i * WIDE + half, sheet, output + half);
                    else
                        finish(0, t, at, m + i * WIDE + half, sheet, output + half);
        }
    }
}

#endif
