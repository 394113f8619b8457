// Preloaded into a process: what a thread allocates for tensors and vectors while it asks for it lies against a
// protected page, with its end or with its beginning, and holds ones only (NaN as a float) until it is written.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { kPage = 4096, kEnd = 1, kBegin = 2 };
static const size_t kArena = (size_t)1 << 36;
static char* arena;
static unsigned* rooms;  // pages of the block at each page of the arena
static size_t used = kPage;
static __thread int mode;
extern void __libc_free(void*);

void guard_mode(int wanted) { mode = wanted; }

__attribute__((constructor)) static void reserve(void) {
  arena = mmap(NULL, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  rooms = mmap(NULL, kArena / kPage * sizeof *rooms, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED || rooms == MAP_FAILED) abort();
}
static void* guarded(size_t size) {
  size_t room = (size + kPage - 1) / kPage * kPage;
  if (!room) room = kPage;
  char* block = arena + __atomic_fetch_add(&used, room + kPage, __ATOMIC_RELAXED);
  if (block + room > arena + kArena || mprotect(block, room, PROT_READ | PROT_WRITE)) return NULL;
  memset(block, 0xff, room);
  rooms[(block - arena) / kPage] = room / kPage;
  return mode == kEnd ? block + room - size : block;
}
int posix_memalign(void** to, size_t alignment, size_t size) {
  *to = mode ? guarded(size) : aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  return *to ? 0 : ENOMEM;
}
void* _Znwm(size_t size) {  // operator new
  void* block = mode ? guarded(size) : malloc(size);
  if (!block) abort();
  return block;
}
void free(void* block) {  // guarded memory is protected from then on
  if ((char*)block < arena || (char*)block >= arena + kArena) return __libc_free(block);
  size_t page = ((char*)block - arena) / kPage, size = rooms[page] * (size_t)kPage;
  if (madvise(arena + page * kPage, size, MADV_DONTNEED) || mprotect(arena + page * kPage, size, PROT_NONE)) abort();
}
void _ZdlPv(void* block) { free(block); }
void _ZdlPvm(void* block, size_t size) { free(block); }
