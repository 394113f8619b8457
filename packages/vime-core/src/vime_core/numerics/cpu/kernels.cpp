// The CPU provider of the dense operations. Definitions: the docstrings of vime_core.numerics and its modules.
//
// Built once per instruction set (AVX2, AVX-512, AVX-512 with BF16) from this one source; all builds give the same
// bits, because each output is a fixed expression over 16 fp32 lanes. Compiled with -ffp-contract=off: a fused
// multiply-add happens only where `fma` is written. Work is split over threads by outputs, never inside a sum.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <immintrin.h>
#include <omp.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

using at::Tensor;
struct bf16 { uint16_t bits; };
constexpr float kInf = std::numeric_limits<float>::infinity();

// ---------------------------------------------------------------------------------------------------- 16 lanes

#if defined(__AVX512F__)
constexpr int kParts = 1;
#else
constexpr int kParts = 2;
#endif
constexpr int kLanes = 16, kPart = kLanes / kParts;
typedef float F __attribute__((vector_size(4 * kPart)));      // one register of fp32
typedef uint32_t U __attribute__((vector_size(4 * kPart)));   // the same register as integers
typedef int32_t I __attribute__((vector_size(4 * kPart)));
typedef uint16_t H __attribute__((vector_size(2 * kPart)));
typedef float F8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef uint16_t H8 __attribute__((vector_size(16)));

struct F16 { F p[kParts]; };
struct Pairs { U p[kParts]; };  // 32 bf16, two neighbours in each 32-bit lane

// one register at a time: a copy of the whole struct would go through memory
template <class R> INLINE R load_register(const void* from) { R r; std::memcpy(&r, from, sizeof r); return r; }
template <class V> INLINE V load_raw(const void* from) {
  V v;
  UNROLL for (int i = 0; i < kParts; i++)
    v.p[i] = load_register<std::decay_t<decltype(v.p[i])>>((const char*)from + i * sizeof v.p[i]);
  return v;
}
template <class Op> INLINE F16 map(Op op) { F16 r; UNROLL for (int i = 0; i < kParts; i++) r.p[i] = op(i); return r; }

INLINE F splat(float x) { return x - F{}; }
INLINE F16 fill(float x) { return map([&](int) { return splat(x); }); }
INLINE F16 operator+(F16 a, F16 b) { return map([&](int i) { return a.p[i] + b.p[i]; }); }
INLINE F16 operator-(F16 a, F16 b) { return map([&](int i) { return a.p[i] - b.p[i]; }); }
INLINE F16 operator*(F16 a, F16 b) { return map([&](int i) { return a.p[i] * b.p[i]; }); }
INLINE F16 operator/(F16 a, F16 b) { return map([&](int i) { return a.p[i] / b.p[i]; }); }
INLINE F16 maximum(F16 a, F16 b) { return map([&](int i) { return a.p[i] > b.p[i] ? a.p[i] : b.p[i]; }); }

#if defined(__AVX512F__)
INLINE F fma_part(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else
INLINE F fma_part(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#endif
INLINE F16 fma(F16 a, F16 b, F16 c) { return map([&](int i) { return fma_part(a.p[i], b.p[i], c.p[i]); }); }

// bf16 <-> fp32; rounding to nearest even, every NaN becomes the quiet one
INLINE F widen(H h) { return (F)(__builtin_convertvector(h, U) << 16); }
template <class UV, class FV> INLINE UV bf16_bits(FV f) {
  UV u = (UV)f, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (u & 0x7fffffff) > 0x7f800000 ? rounded * 0 + 0x7fc0 : rounded;
}

template <class T> struct Numbers;
template <> struct Numbers<float> {
  static constexpr int kStep = 16;  // elements that one step of a dot product takes
  using Raw = F16;
  static INLINE F16 load(const float* from) { return load_raw<F16>(from); }
  static INLINE void store(float* to, F16 v) {
    UNROLL for (int i = 0; i < kParts; i++) std::memcpy(to + i * kPart, &v.p[i], sizeof v.p[i]);
  }
  static INLINE void store8(float* to, F8 v) { std::memcpy(to, &v, sizeof v); }
  static INLINE F16 dot_step(F16 x, F16 w, F16 total) { return fma(x, w, total); }
  static constexpr int kPasses = 1;  // a step of one lane in passes: factors of words, and what is done with them
  static INLINE F factor(U word, int) { return (F)word; }
  static INLINE F step(F x, F w, F total) { return fma_part(x, w, total); }
};
template <> struct Numbers<bf16> {
  static constexpr int kStep = 32;
  using Raw = Pairs;
  static INLINE F16 load(const bf16* from) {
    return map([&](int i) { return widen(load_register<H>(from + i * kPart)); });
  }
  static INLINE void store(bf16* to, F16 v) {
    UNROLL for (int i = 0; i < kParts; i++) {
      H h = __builtin_convertvector(bf16_bits<U>(v.p[i]), H);
      std::memcpy(to + i * kPart, &h, sizeof h);
    }
  }
  static INLINE void store8(bf16* to, F8 v) {
    H8 h = __builtin_convertvector(bf16_bits<U8>(v), H8);
    std::memcpy(to, &h, sizeof h);
  }
  static INLINE F emulated_step(U x, U w, F total) {
    total = fma_part((F)(x & 0xffff0000), (F)(w & 0xffff0000), total);
    return fma_part((F)(x << 16), (F)(w << 16), total);
  }
  static INLINE F16 dot_step(Pairs x, Pairs w, F16 total) {
#if defined(__AVX512BF16__)
    return {(F)_mm512_dpbf16_ps((__m512)total.p[0], (__m512bh)x.p[0], (__m512bh)w.p[0])};
#else
    return map([&](int i) { return emulated_step(x.p[i], w.p[i], total.p[i]); });
#endif
  }
#if defined(__AVX512BF16__)
  static constexpr int kPasses = 1;
  static INLINE F factor(U word, int) { return (F)word; }
  static INLINE F step(F x, F w, F total) { return (F)_mm512_dpbf16_ps((__m512)total, (__m512bh)x, (__m512bh)w); }
#else
  static constexpr int kPasses = 2;
  static INLINE F factor(U word, int pass) { return (F)(pass ? word << 16 : word & 0xffff0000); }
  static INLINE F step(F x, F w, F total) { return fma_part(x, w, total); }
#endif
};

// The first `n` of a full register's elements, zeros after them.
template <class V, class T> INLINE V load_some(const T* from, int64_t n) {
  alignas(64) T buffer[sizeof(V) / sizeof(T)] = {};
  std::memcpy(buffer, from, n * sizeof(T));
  return load_raw<V>(buffer);
}
template <class T> INLINE F16 load(const T* from, int64_t n = kLanes) {
  if (n == kLanes) return Numbers<T>::load(from);
  alignas(64) T buffer[kLanes] = {};
  std::memcpy(buffer, from, n * sizeof(T));
  return Numbers<T>::load(buffer);
}
template <class T> INLINE void store(T* to, F16 v, int64_t n = kLanes) {
  if (n == kLanes) return Numbers<T>::store(to, v);
  alignas(64) T buffer[kLanes];
  Numbers<T>::store(buffer, v);
  std::memcpy(to, buffer, n * sizeof(T));
}
template <class T> INLINE void store8(T* to, F8 v, int64_t n) {
  if (n >= 8) return Numbers<T>::store8(to, v);
  alignas(32) T buffer[8];
  Numbers<T>::store8(buffer, v);
  std::memcpy(to, buffer, n * sizeof(T));
}
// f(first, count) over blocks of 16 elements
template <class Body> INLINE void blocks(int64_t n, Body f) {
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) f(k, (int64_t)kLanes);
  if (k < n) f(k, n - k);
}

// The tree 8, 4, 2, 1 over the lanes, for eight sums at once.
INLINE F8 halves(F16 v) {
#if defined(__AVX512F__)
  return (F8)_mm256_add_ps(_mm512_castps512_ps256((__m512)v.p[0]), _mm512_extractf32x8_ps((__m512)v.p[0], 1));
#else
  return v.p[0] + v.p[1];
#endif
}
INLINE F8 tree8(const F8* sums) {
  __m256 t[4], u[2];
  UNROLL for (int i = 0; i < 4; i++) {
    __m256 a = (__m256)sums[2 * i], b = (__m256)sums[2 * i + 1];
    t[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  UNROLL for (int i = 0; i < 2; i++)
    u[i] = _mm256_add_ps(_mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44),
                         _mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0xEE));
  __m256 v = _mm256_add_ps(_mm256_shuffle_ps(u[0], u[1], 0x88), _mm256_shuffle_ps(u[0], u[1], 0xDD));
  return (F8)_mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
INLINE float tree(F16 v) {
  F8 s = halves(v);
  float a[4];
  for (int i = 0; i < 4; i++) a[i] = s[i] + s[i + 4];
  return (a[0] + a[2]) + (a[1] + a[3]);
}
INLINE float largest(F16 v) {
  float m = -kInf;
  for (int i = 0; i < kParts; i++) for (int j = 0; j < kPart; j++) m = v.p[i][j] > m ? v.p[i][j] : m;
  return m;
}

// --------------------------------------------------------------------------- exp, tanh, log: see arithmetic.py

template <int N> INLINE F polynomial(const float (&c)[N], F x) {
  F v = splat(c[0]);
  UNROLL for (int i = 1; i < N; i++) v = v * x + splat(c[i]);
  return v;
}
INLINE F exp_part(F x) {
  static constexpr float c[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  F shifted = x * splat(1.44269504088896341f) + splat(12582912.0f), n = shifted - splat(12582912.0f);
  F r = (x - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  F fraction = (polynomial(c, r) * (r * r) + r) + splat(1.0f);
  F value = fraction * (F)(((I)shifted - (0x4B400000 - 127)) << 23);
  value = x > splat(88.0f) ? splat(kInf) : value;
  return x < splat(-87.0f) ? splat(0.0f) : value;
}
INLINE F tanh_part(F x) {
  static constexpr float c[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                                -3.33332819422e-1f};
  F size = (F)((U)x & 0x7fffffff), square = x * x;
  F small = (polynomial(c, square) * square) * x + x;
  F large = splat(1.0f) - splat(2.0f) / (exp_part(size + size) + splat(1.0f));
  return size < splat(0.625f) ? small : (x < splat(0.0f) ? -large : large);
}
INLINE F16 exp(F16 x) { return map([&](int i) { return exp_part(x.p[i]); }); }
INLINE F16 tanh(F16 x) { return map([&](int i) { return tanh_part(x.p[i]); }); }

float log_once(float x) {
  int exponent;
  double mantissa = std::frexp((double)x, &exponent);
  if (mantissa < std::sqrt(0.5)) mantissa *= 2.0, exponent -= 1;
  double z = (mantissa - 1.0) / (mantissa + 1.0), series = 1.0 / 23;
  for (int d = 21; d > 0; d -= 2) series = series * (z * z) + 1.0 / d;
  return (float)((double)exponent * 0.6931471805599453 + (2.0 * z) * series);
}

// ------------------------------------------------------------------------------------------------- small helpers

template <class T> T* pointer(const Tensor& t) { return reinterpret_cast<T*>(t.data_ptr()); }

#define BY_DTYPE(tensor, ...)                                                              \
  do {                                                                                     \
    if ((tensor).scalar_type() == at::kFloat) { using T = float; __VA_ARGS__; }            \
    else { TORCH_CHECK((tensor).scalar_type() == at::kBFloat16, "dtype is neither float32 nor bfloat16"); \
           using T = bf16; __VA_ARGS__; }                                                  \
  } while (0)

// Subnormals are zero in every thread, whatever the caller or another library left in its control register.
struct FlushSubnormals {
  unsigned before = _mm_getcsr();
  FlushSubnormals() { _mm_setcsr(0x9fc0); }
  ~FlushSubnormals() { _mm_setcsr(before); }
};

// f(i) for i in 0..n-1 over torch's intra-op threads; `cost` is roughly the operations of one i.
template <class Body> void parallel(int64_t n, int64_t cost, Body f) {
  int threads = omp_in_parallel() || n * cost < 65536 ? 1 : (int)std::min<int64_t>(at::get_num_threads(), n);
  if (threads <= 1) {
    FlushSubnormals guard;
    for (int64_t i = 0; i < n; i++) f(i);
    return;
  }
  int64_t grain = std::max<int64_t>(1, std::min<int64_t>(n / (threads * 8), 1 + 65536 / std::max<int64_t>(cost, 1)));
#pragma omp parallel num_threads(threads)
  {
    FlushSubnormals guard;
#pragma omp for schedule(dynamic, grain)
    for (int64_t i = 0; i < n; i++) f(i);
  }
}

// ------------------------------------------------------------------------------------------------ dot products

// out[i][j] = dot(x[i], w[j]) over elements [from, to), RM rows of x against eight of w. RN of the eight are walked
// side by side, which is a matter of registers only.
#if defined(__AVX512F__)
constexpr int kSide = 8, kRows = 3;
#else
constexpr int kSide = 2, kRows = 2;
#endif
template <class T, int RM, int RN>
INLINE void dots(const T* const* x, const T* const* w, int64_t from, int64_t to, F8* out) {
  using N = Numbers<T>;
  using Raw = typename N::Raw;
  F8 sums[RM][8];
  UNROLL for (int side = 0; side < 8; side += RN) {
    F16 total[RM][RN];
    UNROLL for (int i = 0; i < RM; i++) UNROLL for (int j = 0; j < RN; j++) total[i][j] = fill(0.0f);
    int64_t k = from;
    for (; k + N::kStep <= to; k += N::kStep) {
      Raw a[RM];
      UNROLL for (int i = 0; i < RM; i++) a[i] = load_raw<Raw>(x[i] + k);
      UNROLL for (int j = 0; j < RN; j++) {
        Raw b = load_raw<Raw>(w[side + j] + k);
        UNROLL for (int i = 0; i < RM; i++) total[i][j] = N::dot_step(a[i], b, total[i][j]);
      }
    }
    if (k < to) {
      UNROLL for (int j = 0; j < RN; j++) {
        Raw b = load_some<Raw>(w[side + j] + k, to - k);
        UNROLL for (int i = 0; i < RM; i++)
          total[i][j] = N::dot_step(load_some<Raw>(x[i] + k, to - k), b, total[i][j]);
      }
    }
    UNROLL for (int i = 0; i < RM; i++) UNROLL for (int j = 0; j < RN; j++) sums[i][side + j] = halves(total[i][j]);
  }
  UNROLL for (int i = 0; i < RM; i++) out[i] = tree8(sums[i]);
}

template <class T> struct Linear {
  const T *x, *w, *bias;
  void* y;
  int64_t M, N, K, chunks;
  bool partials, wide;  // wide: y is fp32

  INLINE void put(int64_t m, int64_t n, F8 v) const {
    int64_t count = std::min<int64_t>(8, N - n);
    if (wide) store8((float*)y + m * N + n, v, count); else store8((T*)y + m * N + n, v, count);
  }
  // Rows m..m+RM-1 of eight columns; chunk sums are added in ascending order.
  template <int RM, int RN> INLINE void tile(int64_t m, int64_t n) const {
    const T *rows[RM], *columns[8];
    UNROLL for (int i = 0; i < RM; i++) rows[i] = x + (m + i) * K;
    UNROLL for (int j = 0; j < 8; j++) columns[j] = w + std::min(n + j, N - 1) * K;
    F8 total[RM] = {}, sums[RM];
    int64_t length = K / chunks;
    for (int64_t c = 0; c < chunks; c++) {
      int64_t from = c * length, to = c + 1 == chunks ? K : from + length;
      dots<T, RM, RN>(rows, columns, from, to, sums);
      UNROLL for (int i = 0; i < RM; i++) {
        if (partials) put(c * M + m + i, n, sums[i]);
        total[i] = c ? total[i] + sums[i] : sums[i];
      }
    }
    if (partials) return;
    F8 shift{};
    if (bias) for (int64_t j = 0; j < std::min<int64_t>(8, N - n); j++) shift[j] = load(bias + n + j, 1).p[0][0];
    UNROLL for (int i = 0; i < RM; i++) put(m + i, n, bias ? total[i] + shift : total[i]);
  }
  // Few rows stream the weight: one weight row after another keeps the hardware prefetcher going.
  template <int RM> void rows(int64_t m, int64_t n) const {
    if (M <= kRows) tile<RM, 1>(m, n); else tile<RM, kSide>(m, n);
  }
  // Columns [n0, n1); a block of rows stays in the second-level cache while the weight passes. The next eight
  // columns are fetched in portions, so that memory works while the present ones are used.
  void columns(int64_t n0, int64_t n1) const {
    const int64_t block = std::max<int64_t>(1, (1 << 18) / (K * (int64_t)sizeof(T) * kRows)) * kRows;
    const int64_t lines = (8 * K * (int64_t)sizeof(T) + 63) / 64;
    const int64_t portion = lines / std::min<int64_t>((M + kRows - 1) / kRows, 8) + 1;
    for (int64_t m0 = 0; m0 < M; m0 += block) {
      int64_t m1 = std::min(M, m0 + block);
      for (int64_t n = n0; n < n1; n += 8) {
        const char* ahead = (const char*)(w + (n + 8) * K);
        int64_t left = M > kRows && n + 16 <= n1 ? lines : 0;
        for (int64_t m = m0; m < m1; m += kRows) {
          for (int64_t i = 0; i < portion && left > 0; i++, left--, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
          if (m1 - m >= kRows) rows<kRows>(m, n); else if (m1 - m == 2) rows<2>(m, n); else rows<1>(m, n);
        }
      }
    }
  }
  void run() const {
    int64_t panel = std::max<int64_t>(8, N / (at::get_num_threads() * 8) / 8 * 8);
    parallel((N + panel - 1) / panel, panel * M * K, [&](int64_t i) {
      columns(i * panel, std::min(N, (i + 1) * panel));
    });
  }
};

// ------------------------------------------------------------------------------------------ packed matrix products

// The same sums, lanes apart: a register holds one lane of neighbouring columns, so that a word of x serves all of
// them and the tree over the lanes adds whole registers. Operands are packed into strips of 32-bit words (two bf16 or
// one fp32): [lane in the tree's order][block][row of the strip].
#if defined(__AVX512F__)
constexpr int kTileRows = 8, kTileParts = 3;
#else
constexpr int kTileRows = 4, kTileParts = 2;
#endif
constexpr int kStrip = 8, kPanel = kTileParts * kPart;  // rows of x and of w that a strip holds
constexpr int kWalk[kLanes] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};  // its own inverse

INLINE void transpose8(U8 (&rows)[8]) {
  __m256i r[8], t[8], u[8];
  std::memcpy(r, rows, sizeof r);
  UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; j++) {
    u[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
    u[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    rows[i] = (U8)_mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    rows[i + 4] = (U8)_mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}
// `n` elements at `from`, zeros after them: as they lie, or each in a word of its own
template <class V, class T> INLINE V load_first(const T* from, int64_t n) {
  constexpr int64_t kAll = sizeof(V) / sizeof(T);
  V v{};
  if (n >= kAll) std::memcpy(&v, from, sizeof v); else if (n > 0) std::memcpy(&v, from, n * sizeof(T));
  return v;
}
INLINE U8 words(const float* from, int64_t n) { return load_first<U8>(from, n); }
INLINE U8 words(const bf16* from, int64_t n) { return __builtin_convertvector(load_first<H8>(from, n), U8); }

// (rows, K), contiguous along K (`by_rows`) or along the rows; `stride` is that of the other dimension.
template <class T> struct Operand {
  static constexpr int64_t kWord = 4 / sizeof(T), kStep = Numbers<T>::kStep;
  const T* data;
  int64_t rows, stride;
  bool by_rows;

  static int64_t strip_words(int64_t width, int64_t elements) {
    return width * kLanes * ((elements + kStep - 1) / kStep);
  }
  // Rows [first, last) and elements [from, to) as strips of kWidth rows; zeros where there is nothing. Walks along what
  // is contiguous.
  template <int kWidth> void pack(int64_t first, int64_t last, int64_t from, int64_t to, uint32_t* out) const {
    int64_t all = (to - from + kStep - 1) / kStep, lane = all * kWidth;
    auto place = [&](int64_t row, int64_t block) {
      int64_t strip = (row - first) / kWidth, within = (row - first) % kWidth;
      return out + strip * kLanes * lane + block * kWidth + within;
    };
    if (by_rows) {
      for (int64_t row = first; row < last; row += 8)
        for (int64_t block = 0; block < all; block++)
          rows_of_block(row, from + block * kStep, to, place(row, block), lane);
    } else {
      for (int64_t block = 0; block < all; block++)
        for (int64_t row = first; row < last; row += 8)
          columns_of_block(row, from + block * kStep, to, place(row, block), lane);
    }
  }

 private:
  // Eight rows of the block at k; `lane` is the distance between lanes. Memory is asked for what comes next: eight rows
  // on, or the piece of 64 columns behind this one, which no prefetcher would guess.
  INLINE void rows_of_block(int64_t row, int64_t k, int64_t to, uint32_t* out, int64_t lane) const {
    UNROLL for (int i = 8; i < 16; i++) _mm_prefetch((const char*)(data + (row + i) * stride + k), _MM_HINT_T0);
    UNROLL for (int half = 0; half < 2; half++, k += 8 * kWord) {
      U8 v[8];
      UNROLL for (int i = 0; i < 8; i++)
        v[i] = load_first<U8>(data + (row + i) * stride + k, row + i < rows ? to - k : 0);
      transpose8(v);
      UNROLL for (int i = 0; i < 8; i++) std::memcpy(out + kWalk[8 * half + i] * lane, &v[i], sizeof v[i]);
    }
  }
  INLINE void columns_of_block(int64_t row, int64_t k, int64_t to, uint32_t* out, int64_t lane) const {
    UNROLL for (int i = 0; i < kLanes; i++, k += kWord) {
      if (row % 32 == 0) UNROLL for (int j = 0; j < kWord; j++)
        _mm_prefetch((const char*)(data + (k + j) * stride + row + 64), _MM_HINT_T1);
      U8 v = words(data + k * stride + row, k < to ? rows - row : 0);
      if (kWord == 2) v |= words(data + (k + 1) * stride + row, k + 1 < to ? rows - row : 0) << 16;
      std::memcpy(out + kWalk[i] * lane, &v, sizeof v);
    }
  }
};

// out (kRows, kPanel): the dot products of kRows rows of a strip of x with a strip of w, kSide lanes side by side. Lanes
// come in an order in which the tree 8, 4, 2, 1 needs its newest partial sums only.
template <class T, int kRows, int kSide> __attribute__((noinline)) void tile(const uint32_t* x, const uint32_t* w,
                                                                            int64_t blocks, float* out) {
  using N = Numbers<T>;
  F partial[4][kRows][kTileParts];
  for (int lane = 0, depth = 0; lane < kLanes; lane += kSide, depth++) {
    F total[kSide][kRows][kTileParts] = {};
    for (int64_t block = 0; block < blocks; block++, x += kStrip, w += kPanel)
      UNROLL for (int side = 0; side < kSide; side++) UNROLL for (int pass = 0; pass < N::kPasses; pass++) {
        const uint32_t *xs = x + side * blocks * kStrip, *ws = w + side * blocks * kPanel;
        F b[kTileParts];
        UNROLL for (int j = 0; j < kTileParts; j++) b[j] = N::factor(load_register<U>(ws + j * kPart), pass);
        UNROLL for (int i = 0; i < kRows; i++) {
          F a = N::factor(xs[i] - U{}, pass);
          UNROLL for (int j = 0; j < kTileParts; j++) total[side][i][j] = N::step(a, b[j], total[side][i][j]);
        }
      }
    x += (kSide - 1) * blocks * kStrip, w += (kSide - 1) * blocks * kPanel;
    auto merge = [&](auto& earlier, auto& later) {
      UNROLL for (int i = 0; i < kRows; i++)
        UNROLL for (int j = 0; j < kTileParts; j++) total[0][i][j] = earlier[i][j] + later[i][j];
    };
    if (kSide == 2) merge(total[0], total[kSide - 1]);
    for (int merged = lane / kSide; merged & 1; merged >>= 1) merge(partial[--depth], total[0]);
    std::memcpy(lane + kSide < kLanes ? (float*)partial[depth] : out, total[0], sizeof total[0]);
  }
}

// y = rn(D + b) from packed strips. The smaller operand is packed at once and shared, the other piece by piece by
// whoever multiplies it, so that no packed weight outlives the call.
template <class T> struct Product {
  Operand<T> x, w;
  const T* bias;
  void* y;
  float* totals;  // (M, N) of the chunks so far; y itself where it is fp32
  int64_t K, chunks;
  bool wide;
  static constexpr int64_t kPiece = 64;    // rows of x that are packed together
  static constexpr int64_t kShort = 1024;  // elements up to which two lanes side by side save more than they load

  static int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
  static uint32_t* aligned(std::vector<uint32_t>& buffer, int64_t words) {
    if ((int64_t)buffer.size() < words + 16) buffer.resize(words + 16);
    return (uint32_t*)(((uintptr_t)buffer.data() + 63) / 64 * 64);
  }
  INLINE void finish(const float* tile, int64_t m, int64_t last, int64_t n, int64_t c) const {
    int64_t columns = std::min<int64_t>(kPanel, w.rows - n);
    for (; m < last; m++, tile += kPanel)
      blocks(columns, [&](int64_t k, int64_t count) {
        F16 v = load(tile + k);
        int64_t at_ = m * w.rows + n + k;
        if (c > 0) v = load(totals + at_, count) + v;
        if (c + 1 < chunks) return store(totals + at_, v, count);
        if (bias) v = v + load(bias + n + k, count);
        if (wide) store((float*)y + at_, v, count); else store((T*)y + at_, v, count);
      });
  }
  // Rows [m0, m1) of columns [n0, n1), whose strips begin at a and b.
  void tiles(const uint32_t* a, int64_t m0, int64_t m1, const uint32_t* b, int64_t n0, int64_t n1, int64_t c,
             int64_t elements) const {
    if (elements <= kShort) tiles_of<kTileRows / 2, 2>(a, m0, m1, b, n0, n1, c, elements);
    else tiles_of<kTileRows, 1>(a, m0, m1, b, n0, n1, c, elements);
  }
  template <int kRows, int kSide>
  void tiles_of(const uint32_t* a, int64_t m0, int64_t m1, const uint32_t* b, int64_t n0, int64_t n1, int64_t c,
                int64_t elements) const {
    alignas(64) float out[kRows * kPanel];
    int64_t a_strip = Operand<T>::strip_words(kStrip, elements), b_strip = Operand<T>::strip_words(kPanel, elements);
    int64_t all = a_strip / (kStrip * kLanes);
    for (int64_t n = n0; n < n1; n += kPanel, b += b_strip)
      for (int64_t m = m0; m < m1; m += kRows) {
        tile<T, kRows, kSide>(a + (m - m0) / kStrip * a_strip + (m - m0) % kStrip, b, all, out);
        finish(out, m, std::min(m + kRows, x.rows), n, c);
      }
  }
  // One chunk; `kShareX`: x is the smaller operand.
  template <bool kShareX> void chunk(int64_t c) const {
    constexpr int kShared = kShareX ? kStrip : kPanel, kOther = kShareX ? kPanel : kStrip;
    constexpr int64_t kSharedPiece = kShareX ? kPiece : kPanel, kOtherPiece = kShareX ? kPanel : kPiece;
    const Operand<T>&shared = kShareX ? x : w, &other = kShareX ? w : x;
    int64_t from = c * (K / chunks), to = c + 1 == chunks ? K : from + K / chunks, elements = to - from;
    auto words_of = [&](int64_t rows) { return Operand<T>::strip_words(rows, elements); };
    thread_local std::vector<uint32_t> whole;
    uint32_t* packed = aligned(whole, words_of(up(shared.rows, kSharedPiece)));
    parallel(up(shared.rows, kSharedPiece) / kSharedPiece, kSharedPiece * elements, [&](int64_t i) {
      int64_t first = i * kSharedPiece, last = std::min(first + kSharedPiece, up(shared.rows, kShared));
      shared.template pack<kShared>(first, last, from, to, packed + words_of(first));
    });
    parallel(up(other.rows, kOtherPiece) / kOtherPiece, kOtherPiece * elements * shared.rows, [&](int64_t i) {
      thread_local std::vector<uint32_t> own;
      int64_t first = i * kOtherPiece, last = std::min(first + kOtherPiece, up(other.rows, kOther));
      uint32_t* strips = aligned(own, words_of(kOtherPiece));
      other.template pack<kOther>(first, last, from, to, strips);
      last = std::min(last, other.rows);
      if (kShareX) tiles(packed, 0, x.rows, strips, first, last, c, elements);
      else tiles(strips, first, last, packed, 0, w.rows, c, elements);
    });
  }
  void run() const {
    for (int64_t c = 0; c < chunks; c++) if (x.rows <= w.rows) chunk<true>(c); else chunk<false>(c);
  }
};

// Whether packing pays: with few rows it costs more than it saves, unless an operand lies by columns.
constexpr int64_t kFewRows = 96;
template <class T> Operand<T> operand(const Tensor& t, bool by_rows) {
  return {pointer<T>(t), t.size(0), t.stride(by_rows ? 0 : 1), by_rows};
}
bool by_columns(const Tensor& t) { return t.dim() == 2 && t.stride(0) == 1 && t.stride(1) != 1; }
void packed_linear(const Tensor& x, const Tensor& w, const Tensor& bias, int64_t chunks, bool wide, Tensor& y) {
  bool x_by_rows = !by_columns(x), w_by_rows = !by_columns(w);
  int64_t K = w.size(1);
  Tensor xs = x_by_rows ? x.contiguous().view({-1, K}) : x, ws = w_by_rows ? w.contiguous() : w;
  Tensor totals = wide || chunks == 1 ? y : at::empty(y.sizes(), y.options().dtype(at::kFloat));
  BY_DTYPE(x, (Product<T>{operand<T>(xs, x_by_rows), operand<T>(ws, w_by_rows),
                          bias.defined() ? pointer<T>(bias) : nullptr, y.data_ptr(),
                          reinterpret_cast<float*>(totals.data_ptr()), K, chunks, wide}.run()));
}

Tensor linear_any(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, int64_t chunks, bool wide,
                  bool partials) {
  int64_t K = x.size(-1), N = w.size(0), M = K ? x.numel() / K : 0;
  TORCH_CHECK(w.dim() == 2 && w.size(1) == K && w.scalar_type() == x.scalar_type(), "weight does not fit the input");
  TORCH_CHECK(chunks >= 1 && (chunks == 1 || K % chunks == 0), "K is not a whole number of chunks");
  TORCH_CHECK(!bias || (bias->numel() == N && bias->scalar_type() == x.scalar_type()), "bias does not fit the weight");
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = N;
  if (partials) shape.insert(shape.begin(), chunks);
  Tensor y = at::empty(shape, wide ? x.options().dtype(at::kFloat) : x.options());
  if (!y.numel()) return y;
  Tensor bc = bias ? bias->contiguous() : Tensor();
  if (!partials && K && (M >= kFewRows || by_columns(x) || by_columns(w))) {
    packed_linear(x, w, bc, chunks, wide, y);
    return y;
  }
  Tensor xc = x.contiguous(), wc = w.contiguous();
  BY_DTYPE(x, (Linear<T>{pointer<T>(xc), pointer<T>(wc), bias ? pointer<T>(bc) : nullptr, y.data_ptr(), M, N, K, chunks,
                         partials, wide}.run()));
  return y;
}
Tensor linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, int64_t chunks, bool wide) {
  return linear_any(x, w, bias, chunks, wide, false);
}
Tensor linear_partials(const Tensor& x, const Tensor& w, int64_t chunks) {
  return linear_any(x, w, std::nullopt, chunks, true, true);
}

// The rows of x (M, K) added in ascending order, fp32.
Tensor column_sum(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2, "x is not (M, K)");
  int64_t M = x.size(0), K = x.size(1);
  Tensor xc = x.contiguous(), out = at::empty({K}, x.options().dtype(at::kFloat));
  BY_DTYPE(x, parallel((K + kLanes - 1) / kLanes, M * kLanes, [&](int64_t block) {
    int64_t k = block * kLanes, n = std::min<int64_t>(kLanes, K - k);
    F16 total = fill(0.0f);
    for (int64_t m = 0; m < M; m++) total = total + load(pointer<T>(xc) + m * K + k, n);
    store(pointer<float>(out) + k, total, n);
  }));
  return out;
}

// -------------------------------------------------------------------------------------------------- row operations

template <class T> INLINE float inverse_rms(const T* r, int64_t H, float eps) {
  F16 squares = fill(0.0f);
  blocks(H, [&](int64_t k, int64_t n) { F16 v = load(r + k, n); squares = squares + v * v; });
  return 1.0f / std::sqrt(tree(squares) / (float)H + eps);
}

// y = rn(r * s * w); with a residual, r = rn(x + residual) is written too
template <class T> void norm_row(const T* x, const T* residual, const T* w, T* y, T* r, int64_t H, float eps) {
  if (residual) {
    blocks(H, [&](int64_t k, int64_t n) { store(r + k, load(x + k, n) + load(residual + k, n), n); });
    x = r;
  }
  F16 s = fill(inverse_rms(x, H, eps));
  blocks(H, [&](int64_t k, int64_t n) { store(y + k, load(x + k, n) * s * load(w + k, n), n); });
}
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& w,
                                        double eps) {
  int64_t H = x.size(-1), M = x.numel() / std::max<int64_t>(H, 1);
  TORCH_CHECK(w.numel() == H && w.scalar_type() == x.scalar_type(), "weight does not fit the input");
  TORCH_CHECK(!residual || (residual->sizes() == x.sizes() && residual->scalar_type() == x.scalar_type()),
              "residual does not fit the input");
  Tensor xc = x.contiguous(), wc = w.contiguous(), ac = residual ? residual->contiguous() : Tensor();
  Tensor y = at::empty(x.sizes(), x.options()), r = residual ? at::empty(x.sizes(), x.options()) : Tensor();
  BY_DTYPE(x, parallel(M, H * 4, [&](int64_t m) {
    norm_row<T>(pointer<T>(xc) + m * H, residual ? pointer<T>(ac) + m * H : nullptr, pointer<T>(wc),
                pointer<T>(y) + m * H, residual ? pointer<T>(r) + m * H : nullptr, H, (float)eps);
  }));
  return {y, residual ? r : xc};
}

template <class T>
void norm_backward_row(const T* dy, const T* dr, const T* r, const T* w, T* dx, float s, int64_t H) {
  F16 scale = fill(s), total = fill(0.0f);
  blocks(H, [&](int64_t k, int64_t n) {
    total = total + (load(dy + k, n) * load(w + k, n)) * (load(r + k, n) * scale);
  });
  F16 mean = fill(tree(total) / (float)H);
  blocks(H, [&](int64_t k, int64_t n) {
    F16 d = scale * (load(dy + k, n) * load(w + k, n) - (load(r + k, n) * scale) * mean);
    store(dx + k, dr ? d + load(dr + k, n) : d, n);
  });
}
// dr: gradient of the residual stream, or none. Returns the gradient of r and of the weight (fp32).
std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& dy, const std::optional<Tensor>& dr, const Tensor& r,
                                                 const Tensor& w, double eps) {
  int64_t H = r.size(-1), M = r.numel() / std::max<int64_t>(H, 1);
  Tensor dyc = dy.contiguous(), rc = r.contiguous(), wc = w.contiguous(), drc = dr ? dr->contiguous() : Tensor();
  Tensor dx = at::empty(r.sizes(), r.options()), dw = at::empty({H}, r.options().dtype(at::kFloat));
  Tensor inverse = at::empty({M}, dw.options());
  float* s = pointer<float>(inverse);
  BY_DTYPE(r, {
    T *g = pointer<T>(dyc), *x = pointer<T>(rc);
    parallel(M, H * 8, [&](int64_t m) {
      s[m] = inverse_rms(x + m * H, H, (float)eps);
      norm_backward_row<T>(g + m * H, dr ? pointer<T>(drc) + m * H : nullptr, x + m * H, pointer<T>(wc),
                           pointer<T>(dx) + m * H, s[m], H);
    });
    parallel((H + kLanes - 1) / kLanes, M * kLanes, [&](int64_t block) {
      int64_t k = block * kLanes, n = std::min<int64_t>(kLanes, H - k);
      F16 total = fill(0.0f);
      for (int64_t m = 0; m < M; m++)
        total = total + load(g + m * H + k, n) * (load(x + m * H + k, n) * fill(s[m]));
      store(pointer<float>(dw) + k, total, n);
    });
  });
  return {dx, dw};
}

// x: rows (token, head) of `dim` elements; the first `rotary` of them turn by the token's row of the table
template <class T>
void rope_head(const T* x, const float* cosines, const float* sines, T* y, int64_t rotary, int64_t dim, float sign) {
  int64_t half = rotary / 2;
  blocks(half, [&](int64_t k, int64_t n) {
    F16 a = load(x + k, n), b = load(x + half + k, n), c = load(cosines + k, n), s = load(sines + k, n) * fill(sign);
    store(y + k, a * c - b * s, n);
    store(y + half + k, b * c + a * s, n);
  });
  std::memcpy(y + rotary, x + rotary, (dim - rotary) * sizeof(T));
}
template <class T>
void rope_head_interleaved(const T* x, const float* cosines, const float* sines, T* y, int64_t rotary, int64_t dim,
                           float sign) {
  T even[kLanes], odd[kLanes];
  blocks(rotary / 2, [&](int64_t k, int64_t n) {
    for (int64_t i = 0; i < n; i++) even[i] = x[2 * (k + i)], odd[i] = x[2 * (k + i) + 1];
    F16 a = load(even, n), b = load(odd, n), c = load(cosines + k, n), s = load(sines + k, n) * fill(sign);
    store(even, a * c - b * s, n);
    store(odd, b * c + a * s, n);
    for (int64_t i = 0; i < n; i++) y[2 * (k + i)] = even[i], y[2 * (k + i) + 1] = odd[i];
  });
  std::memcpy(y + rotary, x + rotary, (dim - rotary) * sizeof(T));
}
Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& table, bool interleaved, bool inverse) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1 && (x.size(1) == 1 || x.stride(1) == x.size(2)),
              "input is not (tokens, heads, dim)");
  int64_t tokens = x.size(0), heads = x.size(1), dim = x.size(2), rotary = table.size(1);
  TORCH_CHECK(table.scalar_type() == at::kFloat && table.is_contiguous() && rotary <= dim && rotary % 2 == 0,
              "the table is not (positions, rotary dim) of float32");
  Tensor at_ = positions.to(at::kLong).contiguous(), y = at::empty({tokens, heads, dim}, x.options());
  TORCH_CHECK(at_.numel() == tokens, "one position a token");
  const int64_t* position = pointer<int64_t>(at_);
  for (int64_t t = 0; t < tokens; t++)
    TORCH_CHECK(position[t] >= 0 && position[t] < table.size(0), "position ", position[t], " outside the table of ",
                table.size(0));
  float sign = inverse ? -1.0f : 1.0f;
  BY_DTYPE(x, {
    auto turn = interleaved ? rope_head_interleaved<T> : rope_head<T>;
    parallel(tokens, heads * dim * 2, [&](int64_t t) {
      const float *cosines = pointer<float>(table) + position[t] * rotary, *sines = cosines + rotary / 2;
      const T* from = pointer<T>(x) + t * x.stride(0);
      T* to = pointer<T>(y) + t * heads * dim;
      for (int64_t h = 0; h < heads; h++) turn(from + h * dim, cosines, sines, to + h * dim, rotary, dim, sign);
    });
  });
  return y;
}

INLINE F16 sigmoid(F16 g) { return fill(1.0f) / (fill(1.0f) + exp(fill(0.0f) - g)); }

Tensor swiglu(const Tensor& gate_up) {
  int64_t F2 = gate_up.size(-1), D = F2 / 2, M = gate_up.numel() / std::max<int64_t>(F2, 1);
  Tensor x = gate_up.contiguous();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = D;
  Tensor y = at::empty(shape, x.options());
  BY_DTYPE(x, parallel(M, D * 30, [&](int64_t m) {
    const T *gate = pointer<T>(x) + m * F2, *up = gate + D;
    blocks(D, [&](int64_t k, int64_t n) {
      F16 g = load(gate + k, n), silu = g / (fill(1.0f) + exp(fill(0.0f) - g));
      store(pointer<T>(y) + m * D + k, silu * load(up + k, n), n);
    });
  }));
  return y;
}
Tensor swiglu_backward(const Tensor& dy, const Tensor& gate_up) {
  int64_t F2 = gate_up.size(-1), D = F2 / 2, M = gate_up.numel() / std::max<int64_t>(F2, 1);
  Tensor x = gate_up.contiguous(), g_ = dy.contiguous(), dx = at::empty(x.sizes(), x.options());
  BY_DTYPE(x, parallel(M, D * 40, [&](int64_t m) {
    const T *gate = pointer<T>(x) + m * F2, *up = gate + D, *grad = pointer<T>(g_) + m * D;
    T* d = pointer<T>(dx) + m * F2;
    blocks(D, [&](int64_t k, int64_t n) {
      F16 g = load(gate + k, n), dh = load(grad + k, n), s = sigmoid(g);
      store(d + k, (dh * load(up + k, n)) * (s * (fill(1.0f) + g * (fill(1.0f) - s))), n);
      store(d + D + k, dh * (g * s), n);
    });
  }));
  return dx;
}

// -------------------------------------------------------------------------------------------------------- attention

struct Spec {
  float scale;
  int64_t window;  // keys that a query sees at most, itself included; 0: all
  float cap;       // soft cap of the scores; 0: none
  int64_t first(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
};
struct Scratch {
  std::vector<float> a, b;
  static float* room(std::vector<float>& v, size_t n) { if (v.size() < n) v.resize(n); return v.data(); }
};
INLINE int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Asks memory for the rows j..j+7.
template <class T> INLINE void fetch(const T* const* rows, int64_t j, int64_t n, int64_t dim) {
  for (int64_t i = j; i < std::min(j + 8, n); i++)
    for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(T)) _mm_prefetch((const char*)(rows[i] + d), _MM_HINT_T1);
}
// scores[i][j] = dot(x[i], keys[j]) for RM rows of x; `values`, if any, are fetched for the walk that follows
template <class T, int RM>
void scores_of(const T* const* x, const T* const* keys, int64_t n, int64_t dim, float* scores, int64_t stride,
               const T* const* values = nullptr) {
  for (int64_t j = 0; j < n; j += 8) {
    const T* eight[8];
    F8 out[RM];
    for (int64_t i = 0; i < 8; i++) eight[i] = keys[std::min(j + i, n - 1)];
    if (values) fetch(keys, j + 16, n, dim), fetch(values, j, n, dim);
    dots<T, RM, kSide>(x, eight, 0, dim, out);
    for (int i = 0; i < RM; i++) store8(scores + i * stride + j, out[i], 8);
  }
}
// The scaled and capped scores become exp(score - largest); returns the largest and the sum.
INLINE std::tuple<float, float> weights_of(float* scores, int64_t n, const Spec& spec) {
  F16 high = fill(-kInf), total = fill(0.0f);
  blocks(n, [&](int64_t j, int64_t count) {
    F16 s = load(scores + j) * fill(spec.scale);
    if (spec.cap > 0) s = fill(spec.cap) * tanh(s / fill(spec.cap));
    store(scores + j, s);
    for (int64_t i = count; i < kLanes; i++) scores[j + i] = -kInf;
    high = maximum(load(scores + j), high);
  });
  float m = largest(high);
  blocks(n, [&](int64_t j, int64_t) {
    F16 e = exp(load(scores + j) - fill(m));
    store(scores + j, e);
    total = total + e;
  });
  return {m, tree(total)};
}
// out[i][d..] = sum over j ascending of weights[i][j] * values[j][d..], DV registers wide
template <class T, int RM, int DV>
INLINE void weighted_sum(const float* weights, int64_t stride, const T* const* values, int64_t n, int64_t d,
                         int64_t count, F16 (&total)[RM][DV]) {
  UNROLL for (int i = 0; i < RM; i++) UNROLL for (int v = 0; v < DV; v++) total[i][v] = fill(0.0f);
  for (int64_t j = 0; j < n; j++)
    UNROLL for (int v = 0; v < DV; v++) {
      F16 value = load(values[j] + d + v * kLanes, count);
      UNROLL for (int i = 0; i < RM; i++) total[i][v] = fma(fill(weights[i * stride + j]), value, total[i][v]);
    }
}
template <class T, int RM, class Put>
void weighted_rows(const float* weights, int64_t stride, const T* const* values, int64_t n, int64_t dim, Put put) {
  constexpr int DV = kParts == 1 ? 4 : 2;
  int64_t d = 0;
  for (; d + DV * kLanes <= dim; d += DV * kLanes) {
    F16 total[RM][DV];
    weighted_sum<T, RM, DV>(weights, stride, values, n, d, kLanes, total);
    for (int i = 0; i < RM; i++) for (int v = 0; v < DV; v++) put(i, d + v * kLanes, kLanes, total[i][v]);
  }
  for (; d < dim; d += kLanes) {
    int64_t count = std::min<int64_t>(kLanes, dim - d);
    F16 total[RM][1];
    weighted_sum<T, RM, 1>(weights, stride, values, n, d, count, total);
    for (int i = 0; i < RM; i++) put(i, d, count, total[i][0]);
  }
}
// One query token, RM of the heads that share a KV head; keys and values: the visible ones in ascending order.
template <class T, int RM>
void attend(const T* q, const T* const* keys, const T* const* values, int64_t n, int64_t dim, const Spec& spec, T* o,
            float* lse, Scratch& scratch) {
  int64_t stride = padded(n);
  float* scores = Scratch::room(scratch.a, RM * stride);
  const T* rows[RM];
  float sums[RM];
  for (int i = 0; i < RM; i++) rows[i] = q + i * dim;
  scores_of<T, RM>(rows, keys, n, dim, scores, stride, values);
  for (int i = 0; i < RM; i++) {
    auto [m, sum] = weights_of(scores + i * stride, n, spec);
    sums[i] = sum;
    if (lse) lse[i] = m + log_once(sum);
  }
  weighted_rows<T, RM>(scores, stride, values, n, dim, [&](int i, int64_t d, int64_t count, F16 total) {
    store(o + i * dim + d, total / fill(sums[i]), count);
  });
}
template <class T>
void attend_group(const T* q, const T* const* keys, const T* const* values, int64_t n, int64_t group, int64_t dim,
                  const Spec& spec, T* o, float* lse, Scratch& scratch) {
  int64_t g = 0;
  auto rest = [&](auto rows) {
    constexpr int RM = decltype(rows)::value;
    for (; g + RM <= group; g += RM)
      attend<T, RM>(q + g * dim, keys, values, n, dim, spec, o + g * dim, lse ? lse + g : nullptr, scratch);
  };
  rest(std::integral_constant<int, kRows>{});
  rest(std::integral_constant<int, 2>{});
  rest(std::integral_constant<int, 1>{});
}

// Addresses of rows: token by token, or through pages.
template <class T> struct Rows {
  const T* base;
  int64_t outer, head, inner;  // strides: token (packed) or page; head; slot of a page
  Rows(const Tensor& t)
      : base(pointer<T>(t)), outer(t.stride(0)), head(t.stride(1)), inner(t.dim() == 4 ? t.stride(2) : 0) {}
  void packed(std::vector<const T*>& to, int64_t from, int64_t n, int64_t h) const {
    to.resize(n);
    for (int64_t j = 0; j < n; j++) to[j] = base + (from + j) * outer + h * head;
  }
  void paged(std::vector<const T*>& to, const int64_t* table, int64_t page, int64_t from, int64_t n, int64_t h) const {
    to.resize(n);
    int64_t block = from / page, slot = from % page;
    for (int64_t j = 0; j < n; j++, slot++) {
      if (slot == page) slot = 0, block++;
      to[j] = base + table[block] * outer + h * head + slot * inner;
    }
  }
};

void check_heads(const Tensor& t, int64_t dim) {
  TORCH_CHECK(t.dim() == 3 && t.size(2) == dim && t.stride(2) == 1 && (t.size(1) == 1 || t.stride(1) == dim),
              "queries, keys and values are (tokens, heads, head dim)");
}
std::vector<int64_t> integers(const Tensor& t) {
  Tensor c = t.to(at::kLong).contiguous();
  return {pointer<int64_t>(c), pointer<int64_t>(c) + c.numel()};
}

std::tuple<Tensor, Tensor> attention_packed(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
                                            double scale, int64_t window, double cap) {
  int64_t tokens = q.size(0), heads = q.size(1), dim = q.size(2), kv_heads = k.size(1), group = heads / kv_heads;
  check_heads(q, dim), check_heads(k, dim), check_heads(v, dim);
  std::vector<int64_t> cu = integers(cu_seqlens), begin(tokens);
  TORCH_CHECK(cu.size() && cu.front() == 0 && cu.back() == tokens && std::is_sorted(cu.begin(), cu.end()) &&
              k.size(0) == tokens && v.size(0) == tokens, "cu_seqlens does not cover the tokens");
  for (size_t b = 0; b + 1 < cu.size(); b++) std::fill(begin.begin() + cu[b], begin.begin() + cu[b + 1], cu[b]);
  Tensor o = at::empty({tokens, heads, dim}, q.options());
  Tensor lse = at::empty({tokens, heads}, q.options().dtype(at::kFloat));
  Spec spec{(float)scale, window, (float)cap};
  BY_DTYPE(q, {
    Rows<T> queries(q), k_rows(k), v_rows(v);
    T* out = pointer<T>(o);
    float* sums = pointer<float>(lse);
    parallel(tokens * kv_heads, group * dim * std::max<int64_t>(tokens, 1), [&](int64_t task) {
      thread_local Scratch scratch;
      thread_local std::vector<const T*> keys, values;
      int64_t t = task / kv_heads, h = task % kv_heads, from = begin[t] + spec.first(t - begin[t]), n = t + 1 - from;
      k_rows.packed(keys, from, n, h), v_rows.packed(values, from, n, h);
      attend_group<T>(queries.base + t * queries.outer + h * group * dim, keys.data(), values.data(), n, group, dim,
                      spec, out + (t * heads + h * group) * dim, sums + t * heads + h * group, scratch);
    });
  });
  return {o, lse};
}

// Caches are (pages, KV heads, page size, head dim) with any strides but the last.
void check_cache(const Tensor& cache, const Tensor& like) {
  TORCH_CHECK(cache.dim() == 4 && cache.stride(3) == 1 && cache.scalar_type() == like.scalar_type(),
              "a cache is (pages, KV heads, page size, head dim) of the queries' dtype");
}
void attention_paged(const Tensor& q, const Tensor& key_cache, const Tensor& value_cache, const Tensor& query_start,
                     const Tensor& seq_lens, const Tensor& block_table, double scale, int64_t window, double cap,
                     const Tensor& o) {
  int64_t heads = q.size(1), dim = q.size(2), kv_heads = key_cache.size(1), page = key_cache.size(2);
  int64_t group = heads / kv_heads, width = block_table.size(1);
  check_heads(q, dim), check_cache(key_cache, q), check_cache(value_cache, q);
  std::vector<int64_t> start = integers(query_start), length = integers(seq_lens), table = integers(block_table);
  int64_t requests = (int64_t)length.size(), tokens = q.size(0);
  TORCH_CHECK((int64_t)start.size() == requests + 1 && start.back() <= tokens && block_table.size(0) >= requests,
              "query_start, seq_lens and block_table disagree");
  std::vector<int64_t> request(start.back());
  for (int64_t r = 0; r < requests; r++) {
    TORCH_CHECK(length[r] >= start[r + 1] - start[r] && (length[r] + page - 1) / page <= width,
                "a request is longer than its block table or shorter than its queries");
    for (int64_t i = 0; i < (length[r] + page - 1) / page; i++)
      TORCH_CHECK(table[r * width + i] >= 0 && table[r * width + i] < key_cache.size(0), "a page outside the cache");
    std::fill(request.begin() + start[r], request.begin() + start[r + 1], r);
  }
  TORCH_CHECK(o.sizes() == q.sizes() && o.is_contiguous() && o.scalar_type() == q.scalar_type(),
              "the result is not like the queries");
  Spec spec{(float)scale, window, (float)cap};
  int64_t longest = requests ? *std::max_element(length.begin(), length.end()) : 0;
  BY_DTYPE(q, {
    Rows<T> queries(q), k_rows(key_cache), v_rows(value_cache);
    T* out = pointer<T>(o);
    parallel(start.back() * kv_heads, group * dim * std::max<int64_t>(longest, 1), [&](int64_t task) {
      thread_local Scratch scratch;
      thread_local std::vector<const T*> keys, values;
      int64_t t = task / kv_heads, h = task % kv_heads, r = request[t];
      int64_t position = length[r] - (start[r + 1] - t), from = spec.first(position), n = position + 1 - from;
      k_rows.paged(keys, &table[r * width], page, from, n, h);
      v_rows.paged(values, &table[r * width], page, from, n, h);
      attend_group<T>(queries.base + t * queries.outer + h * group * dim, keys.data(), values.data(), n, group, dim,
                      spec, out + (t * heads + h * group) * dim, nullptr, scratch);
    });
  });
}
void write_kv(const Tensor& k, const Tensor& v, const Tensor& key_cache, const Tensor& value_cache,
              const Tensor& slots) {
  int64_t kv_heads = k.size(1), dim = k.size(2), page = key_cache.size(2);
  check_heads(k, dim), check_heads(v, dim), check_cache(key_cache, k), check_cache(value_cache, v);
  std::vector<int64_t> slot = integers(slots);
  TORCH_CHECK((int64_t)slot.size() <= k.size(0) && key_cache.size(1) == kv_heads, "keys do not fit the cache");
  for (int64_t s : slot) TORCH_CHECK(s < key_cache.size(0) * page, "slot ", s, " outside the cache");
  BY_DTYPE(k, parallel((int64_t)slot.size(), kv_heads * dim * 2, [&](int64_t t) {
    if (slot[t] < 0) return;
    int64_t block = slot[t] / page, at_ = slot[t] % page;
    auto copy = [&](const Tensor& from, const Tensor& cache) {
      for (int64_t h = 0; h < kv_heads; h++)
        std::memcpy(pointer<T>(cache) + block * cache.stride(0) + h * cache.stride(1) + at_ * cache.stride(2),
                    pointer<T>(from) + t * from.stride(0) + h * dim, dim * sizeof(T));
    };
    copy(k, key_cache), copy(v, value_cache);
  }));
}

// One (sequence, KV head): heads first, then queries ascending, keys ascending; dk and dv are (n, dim) of fp32.
template <class T> struct AttentionBackward {
  const T *q, *o, *dy;
  const float* lse;
  T* dq;
  int64_t q_stride, heads, dim;  // q_stride: between tokens; o, dy and dq are contiguous
  Spec spec;

  INLINE void add_scaled(float* to, float weight, const T* from) const {
    blocks(dim, [&](int64_t d, int64_t n) { store(to + d, fma(fill(weight), load(from + d, n), load(to + d, n)), n); });
  }
  // scores[j] becomes the weight p, dp[j] the gradient of the unscaled score times the scale
  INLINE void score_gradients(float* scores, float* dp, int64_t n, float lse_i, float delta) const {
    blocks(padded(n), [&](int64_t j, int64_t) {
      F16 s = load(scores + j) * fill(spec.scale), slope = fill(1.0f);
      if (spec.cap > 0) {
        F16 t = tanh(s / fill(spec.cap));
        s = fill(spec.cap) * t, slope = fill(1.0f) - t * t;
      }
      F16 p = exp(s - fill(lse_i));
      store(scores + j, p);
      store(dp + j, (p * (load(dp + j) - fill(delta))) * slope * fill(spec.scale));
    });
  }
  void query(int64_t i, int64_t head, const T* const* keys, const T* const* values, float* dk, float* dv,
             Scratch& scratch) const {
    const T *q_i = q + i * q_stride + head * dim, *dy_i = dy + (i * heads + head) * dim;
    const T* o_i = o + (i * heads + head) * dim;
    int64_t from = spec.first(i), n = i + 1 - from;
    float *scores = Scratch::room(scratch.a, padded(n)), *dp = Scratch::room(scratch.b, padded(n));
    scores_of<T, 1>(&q_i, keys + from, n, dim, scores, 0);
    scores_of<T, 1>(&dy_i, values + from, n, dim, dp, 0);
    std::fill(scores + n, scores + padded(n), 0.0f), std::fill(dp + n, dp + padded(n), 0.0f);
    float delta[8];
    scores_of<T, 1>(&dy_i, &o_i, 1, dim, delta, 0);
    score_gradients(scores, dp, n, lse[i * heads + head], delta[0]);
    weighted_rows<T, 1>(dp, 0, keys + from, n, dim, [&](int, int64_t d, int64_t count, F16 total) {
      store(dq + (i * heads + head) * dim + d, total, count);
    });
    for (int64_t j = 0; j < n; j++) {
      add_scaled(dk + (from + j) * dim, dp[j], q_i);
      add_scaled(dv + (from + j) * dim, scores[j], dy_i);
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& dy, const Tensor& q, const Tensor& k,
                                                      const Tensor& v, const Tensor& o, const Tensor& lse,
                                                      const Tensor& cu_seqlens, double scale, int64_t window,
                                                      double cap) {
  int64_t tokens = q.size(0), heads = q.size(1), dim = q.size(2), kv_heads = k.size(1), group = heads / kv_heads;
  check_heads(q, dim), check_heads(k, dim), check_heads(v, dim);
  std::vector<int64_t> cu = integers(cu_seqlens);
  Tensor dyc = dy.contiguous(), oc = o.contiguous(), lse_ = lse.contiguous();
  Tensor dq = at::empty({tokens, heads, dim}, q.options());
  Tensor dk = at::empty({tokens, kv_heads, dim}, k.options()), dv = at::empty({tokens, kv_heads, dim}, v.options());
  int64_t tasks = ((int64_t)cu.size() - 1) * kv_heads;
  BY_DTYPE(q, parallel(tasks, 1 << 20, [&](int64_t task) {
    Scratch scratch, sums;
    int64_t b = task / kv_heads, h = task % kv_heads, t0 = cu[b], n = cu[b + 1] - t0;
    AttentionBackward<T> one{pointer<T>(q) + t0 * q.stride(0), pointer<T>(oc) + t0 * heads * dim,
                             pointer<T>(dyc) + t0 * heads * dim, pointer<float>(lse_) + t0 * heads,
                             pointer<T>(dq) + t0 * heads * dim, q.stride(0), heads, dim,
                             Spec{(float)scale, window, (float)cap}};
    std::vector<const T*> keys, values;
    Rows<T>(k).packed(keys, t0, n, h), Rows<T>(v).packed(values, t0, n, h);
    std::vector<float> dk_sum(n * dim, 0.0f), dv_sum(n * dim, 0.0f);
    for (int64_t head = h * group; head < (h + 1) * group; head++)
      for (int64_t i = 0; i < n; i++)
        one.query(i, head, keys.data(), values.data(), dk_sum.data(), dv_sum.data(), scratch);
    for (int64_t j = 0; j < n; j++) {
      int64_t row = ((t0 + j) * kv_heads + h) * dim;
      T *to_k = pointer<T>(dk) + row, *to_v = pointer<T>(dv) + row;
      blocks(dim, [&](int64_t d, int64_t m) {
        store(to_k + d, load(dk_sum.data() + j * dim + d, m), m);
        store(to_v + d, load(dv_sum.data() + j * dim + d, m), m);
      });
    }
  }));
  return {dq, dk, dv};
}

// --------------------------------------------------------------------------------------------------------- log-probs

struct Row { float largest, log_sum; };
// z = logits / temperature into a buffer of padded(V) floats, -inf after the end; returns the largest
template <class T> INLINE float scaled_row(const T* logits, float temperature, int64_t V, float* z) {
  F16 high = fill(-kInf);
  blocks(V, [&](int64_t k, int64_t n) {
    store(z + k, load(logits + k, n) / fill(temperature));
    for (int64_t i = n; i < kLanes; i++) z[k + i] = -kInf;
    high = maximum(load(z + k), high);
  });
  return largest(high);
}
template <class T> INLINE Row softmax_row(const T* logits, float temperature, int64_t V, float* z) {
  float m = scaled_row<T>(logits, temperature, V, z);
  F16 total = fill(0.0f);
  blocks(V, [&](int64_t k, int64_t) { total = total + exp(load(z + k) - fill(m)); });
  return {m, log_once(tree(total))};
}
struct Logits {
  Tensor values;
  std::vector<float> temperature;  // what logits are divided by: 1 in place of 0
  std::vector<bool> greedy;
  int64_t M, V;
  Logits(const Tensor& logits, const Tensor& t) : values(logits.contiguous()) {
    V = logits.size(-1), M = logits.numel() / std::max<int64_t>(V, 1);
    TORCH_CHECK(t.scalar_type() == at::kFloat && t.numel() == M, "one float32 temperature a row");
    Tensor given = t.contiguous();
    for (int64_t m = 0; m < M; m++) {  // not where FlushSubnormals makes small temperatures 0
      float one = pointer<float>(given)[m];
      greedy.push_back(one == 0.0f), temperature.push_back(one == 0.0f ? 1.0f : one);
    }
  }
  // f(row, z, {largest, log_sum}, the row's logits)
  template <class Body> void rows(Body f) const {
    BY_DTYPE(values, parallel(M, V * 30, [&](int64_t m) {
      thread_local std::vector<float> buffer;
      float* z = Scratch::room(buffer, padded(V));
      const T* logits = pointer<T>(values) + m * V;
      f(m, z, softmax_row<T>(logits, temperature[m], V, z), logits);
    }));
  }
};
Tensor log_softmax(const Tensor& logits, const Tensor& temperature) {
  Logits in(logits, temperature);
  Tensor out = at::empty(logits.sizes(), logits.options().dtype(at::kFloat));
  in.rows([&](int64_t m, float* z, Row row, auto*) {
    blocks(in.V, [&](int64_t k, int64_t n) {
      store(pointer<float>(out) + m * in.V + k, (load(z + k) - fill(row.largest)) - fill(row.log_sum), n);
    });
  });
  return out;
}
int64_t checked_id(const int64_t* ids, int64_t m, int64_t V) {
  TORCH_CHECK(ids[m] >= 0 && ids[m] < V, "token id ", ids[m], " outside the vocabulary of ", V);
  return ids[m];
}
Tensor token_log_probs(const Tensor& logits, const Tensor& token_ids, const Tensor& temperature) {
  Logits in(logits, temperature);
  std::vector<int64_t> ids = integers(token_ids);
  TORCH_CHECK((int64_t)ids.size() == in.M, "one token id a row");
  for (int64_t m = 0; m < in.M; m++) checked_id(ids.data(), m, in.V);
  Tensor out = at::empty({in.M}, logits.options().dtype(at::kFloat));
  in.rows([&](int64_t m, float* z, Row row, auto*) {
    pointer<float>(out)[m] = (z[ids[m]] - row.largest) - row.log_sum;
  });
  return out;
}
Tensor token_log_probs_backward(const Tensor& grad, const Tensor& logits, const Tensor& token_ids,
                                const Tensor& temperature) {
  Logits in(logits, temperature);
  std::vector<int64_t> ids = integers(token_ids);
  Tensor dx = at::empty(in.values.sizes(), logits.options()), g = grad.contiguous();
  in.rows([&](int64_t m, float* z, Row row, auto* logits) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(logits)>>;
    F16 scale = fill(pointer<float>(g)[m] / in.temperature[m]), zero = fill(0.0f);
    blocks(in.V, [&](int64_t k, int64_t n) {
      F16 p = exp((load(z + k) - fill(row.largest)) - fill(row.log_sum)), one_hot = zero;
      if (ids[m] >= k && ids[m] < k + n) one_hot.p[(ids[m] - k) / kPart][(ids[m] - k) % kPart] = 1.0f;
      store(pointer<T>(dx) + m * in.V + k, (one_hot - p) * scale, n);
    });
  });
  return dx;
}

// Tokens in the order (z descending, id ascending): those before which less than `limit` of `measure` lies.
// Radix descent over the order-preserving bits of z; `keep` is cut down in place.
void keep_first(const std::vector<uint32_t>& order, const std::vector<int64_t>& measure, double limit, bool* keep) {
  int64_t V = (int64_t)order.size(), before = 0;
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t sums[256] = {};
    bool present[256] = {};
    for (int64_t i = 0; i < V; i++)
      if (keep[i] && (shift == 24 || (order[i] >> (shift + 8)) == (prefix >> (shift + 8))))
        sums[(order[i] >> shift) & 255] += measure[i], present[(order[i] >> shift) & 255] = true;
    int digit = 255, lowest = -1;
    for (; digit >= 0; digit--) {
      if (!present[digit]) continue;
      lowest = digit;
      if ((double)(before + sums[digit]) >= limit) break;
      before += sums[digit];
    }
    if (digit < 0) {  // the limit lies beyond the last token of this prefix: that token is kept, so go on with it
      if (lowest < 0) return;
      digit = lowest, before -= sums[lowest];
    }
    prefix |= (uint32_t)digit << shift;
  }
  for (int64_t i = 0; i < V; i++) {
    if (order[i] == prefix && keep[i]) {
      keep[i] = (double)before < limit;
      before += measure[i];
    } else {
      keep[i] = keep[i] && order[i] > prefix;
    }
  }
}
// top_k (rows) of int64, 0: off; top_p (rows) of float32, 1: off
Tensor keep_mask(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p) {
  Logits in(logits, temperature);
  std::vector<int64_t> k = integers(top_k);
  Tensor p = top_p.contiguous(), out = at::ones(logits.sizes(), logits.options().dtype(at::kBool));
  TORCH_CHECK((int64_t)k.size() == in.M && p.numel() == in.M && p.scalar_type() == at::kFloat,
              "one top_k and one top_p a row");
  in.rows([&](int64_t m, float* z, Row row, auto*) {
    bool* keep = pointer<bool>(out) + m * in.V;
    std::vector<uint32_t> order(in.V);
    std::vector<int64_t> measure(in.V, 1);
    for (int64_t i = 0; i < in.V; i++) {
      float ordered = z[i] == z[i] ? z[i] + 0.0f : -kInf;  // NaN last, -0 as +0
      uint32_t bits;
      std::memcpy(&bits, &ordered, 4);
      order[i] = bits >> 31 ? ~bits : bits | 0x80000000u;
    }
    if (k[m] > 0 && k[m] < in.V) keep_first(order, measure, (double)k[m], keep);
    float top = pointer<float>(p)[m];
    if (!(top < 1.0f)) return;
    int64_t total = 0;
    blocks(in.V, [&](int64_t from, int64_t n) {
      float e[kLanes];
      store(e, exp(load(z + from) - fill(row.largest)));
      for (int64_t i = 0; i < n; i++) {
        measure[from + i] = keep[from + i] && e[i] == e[i] ? (int64_t)((double)e[i] * 4294967296.0) : 0;
        total += measure[from + i];
      }
    });
    keep_first(order, measure, std::max((double)top * (double)total, 1.0), keep);
  });
  return out;
}

// z becomes the weights floor(exp(z - m) 2^40), as far as `V`; returns their sum
INLINE int64_t draw_weights(const float* z, float m, int64_t V, int64_t* weights) {
  int64_t total = 0;
  blocks(V, [&](int64_t from, int64_t n) {
    float e[kLanes];
    store(e, exp(load(z + from) - fill(m)));
    for (int64_t i = 0; i < n; i++) {
      weights[from + i] = e[i] == e[i] ? (int64_t)((double)e[i] * 1099511627776.0) : 0;
      total += weights[from + i];
    }
  });
  return total;
}
INLINE int64_t draw_row(const float* z, float m, int64_t V, int64_t u, int64_t* weights) {
  if (u < 0) {
    for (int64_t i = 0; i < V; i++) if (z[i] == m) return i;
    return 0;
  }
  int64_t total = draw_weights(z, m, V, weights);
  double share = (double)(u >> 10) * 0x1p-53;
  int64_t target = std::min((int64_t)(share * (double)total), total - 1), sum = 0;
  for (int64_t i = 0; i < V && total > 0; i++) if ((sum += weights[i]) > target) return i;
  return 0;
}
// u (rows) of int64: random numbers below 2^63; negative, or a temperature of 0, for the largest logit
Tensor draw(const Tensor& logits, const Tensor& temperature, const Tensor& u) {
  Logits in(logits, temperature);
  std::vector<int64_t> numbers = integers(u);
  TORCH_CHECK((int64_t)numbers.size() == in.M, "one random number a row");
  Tensor out = at::empty({in.M}, logits.options().dtype(at::kLong));
  BY_DTYPE(in.values, parallel(in.M, in.V * 30, [&](int64_t m) {
    thread_local std::vector<float> buffer;
    thread_local std::vector<int64_t> weights;
    float* z = Scratch::room(buffer, padded(in.V));
    if ((int64_t)weights.size() < in.V) weights.resize(in.V);
    float largest_z = scaled_row<T>(pointer<T>(in.values) + m * in.V, in.temperature[m], in.V, z);
    pointer<int64_t>(out)[m] = draw_row(z, largest_z, in.V, in.greedy[m] ? -1 : numbers[m], weights.data());
  }));
  return out;
}

// Does this machine's vdpbf16ps, if this build uses it, equal the two fused multiply-adds of the definition?
bool bf16_step_agrees() {
  FlushSubnormals guard;
  uint64_t state = 0x9E3779B97F4A7C15ull;
  auto next = [&] { state ^= state << 13, state ^= state >> 7, state ^= state << 17; return (uint32_t)(state >> 32); };
  for (int trial = 0; trial < 20000; trial++) {
    uint32_t x[16], w[16], c[16], narrow = trial % 2 ? 0x3fff3fff : 0xffffffff;
    uint32_t wide = trial % 3 ? 0x3fffffff : 0xffffffff;
    for (int i = 0; i < 16; i++) x[i] = next() & narrow, w[i] = next() & narrow, c[i] = next() & wide;
    Pairs a = load_raw<Pairs>(x), b = load_raw<Pairs>(w);
    F16 total = load_raw<F16>(c), got = Numbers<bf16>::dot_step(a, b, total);
    F16 want = map([&](int i) { return Numbers<bf16>::emulated_step(a.p[i], b.p[i], total.p[i]); });
    for (int i = 0; i < kParts; i++)
      for (int j = 0; j < kPart; j++)
        if (((U)got.p[i])[j] != ((U)want.p[i])[j] && (got.p[i][j] == got.p[i][j] || want.p[i][j] == want.p[i][j]))
          return false;
  }
  return true;
}

}  // namespace

#define KERNEL(name) m.def(#name, torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(name)))

TORCH_LIBRARY(VIME_NAMESPACE, m) {
  KERNEL(linear);
  KERNEL(linear_partials);
  KERNEL(column_sum);
  KERNEL(add_rms_norm);
  KERNEL(add_rms_norm_backward);
  KERNEL(rope);
  KERNEL(swiglu);
  KERNEL(swiglu_backward);
  KERNEL(attention_packed);
  KERNEL(attention_backward);
  KERNEL(attention_paged);
  KERNEL(write_kv);
  KERNEL(log_softmax);
  KERNEL(token_log_probs);
  KERNEL(token_log_probs_backward);
  KERNEL(keep_mask);
  KERNEL(draw);
  m.def("bf16_step_agrees", &bf16_step_agrees);
}
