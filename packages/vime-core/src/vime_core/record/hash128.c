/* The hash of hash128.py in plain C. The definition and the collision argument stand there.
 *
 * A product of a 32-bit word and a 64-bit key is taken as word * low half (64 bits) plus word * high half (its low 32
 * bits count), and four blocks share each load of the keys: compilers then vectorise it on SSE2, AVX2 and AVX-512. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little-endian"
#endif

enum { BLOCK_WORDS = 2048, TOGETHER = 4 };
static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

/* Tensors may begin at any byte. */
typedef uint32_t word __attribute__((aligned(1), may_alias));

/* low halves of a and b, then high halves */
static uint32_t a_low[BLOCK_WORDS], b_low[BLOCK_WORDS], a_high[BLOCK_WORDS], b_high[BLOCK_WORDS];

static uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

static uint64_t stream(uint64_t n) { return mix(n * GOLDEN); }

/* Call once, before any hash. */
void vime_hash128_prepare(void) {
  for (uint64_t i = 0; i < BLOCK_WORDS; i++) {
    uint64_t a = stream(2 * i + 1) | 1, b = stream(2 * i + 2) | 1;
    a_low[i] = (uint32_t)a, a_high[i] = (uint32_t)(a >> 32);
    b_low[i] = (uint32_t)b, b_high[i] = (uint32_t)(b >> 32);
  }
}

static void add_term(uint64_t total[2], uint64_t p, uint64_t q, uint64_t block) {
  total[0] += mix(p + stream(2 * BLOCK_WORDS + 1 + 2 * block));
  total[1] += mix(q + stream(2 * BLOCK_WORDS + 2 + 2 * block));
}

static inline __attribute__((always_inline)) void add_blocks(uint64_t total[2], const word *data, size_t count,
                                                             uint64_t first) {
  uint64_t p_low[TOGETHER] = {0}, q_low[TOGETHER] = {0};
  uint32_t p_high[TOGETHER] = {0}, q_high[TOGETHER] = {0};
  for (size_t i = 0; i < BLOCK_WORDS; i++) {
    for (size_t n = 0; n < count; n++) {
      uint32_t w = data[n * BLOCK_WORDS + i];
      p_low[n] += (uint64_t)w * a_low[i], p_high[n] += w * a_high[i];
      q_low[n] += (uint64_t)w * b_low[i], q_high[n] += w * b_high[i];
    }
  }
  for (size_t n = 0; n < count; n++)
    add_term(total, p_low[n] + ((uint64_t)p_high[n] << 32), q_low[n] + ((uint64_t)q_high[n] << 32), first + n);
}

/* total[2] = (A, B) of `length` bytes at `data`. */
void vime_hash128(const unsigned char *data, uint64_t length, uint64_t total[2]) {
  const size_t size = sizeof(word) * BLOCK_WORDS;
  uint64_t block = 0, whole = length / size;
  total[0] = total[1] = 0;
  for (; block + TOGETHER <= whole; block += TOGETHER)
    add_blocks(total, (const word *)(data + block * size), TOGETHER, block);
  for (; block < whole; block++)
    add_blocks(total, (const word *)(data + block * size), 1, block);
  if (length % size) {
    unsigned char tail[sizeof(word) * BLOCK_WORDS] = {0};
    memcpy(tail, data + whole * size, length % size);
    add_blocks(total, (const word *)tail, 1, block++);
  }
  add_term(total, length, length, block);
}
