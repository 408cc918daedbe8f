// A driver of CUDA with one GPU, for tests/data/test_memory.py: counts the memory that is locked.
// FAKE_CUDA_IDLE=1: nobody uses the GPU. FAKE_CUDA_REFUSES=1: no memory is unlocked.
#include <cstdlib>
#include <map>
#include <mutex>

namespace {

std::mutex mutex;
std::map<void*, size_t> locked;
int contexts = 0, pushed = 0, wrong = 0;

bool is(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value == '1';
}

}  // namespace

extern "C" {

int cuDeviceGetCount(int* count) { return *count = 1, 0; }

int cuDevicePrimaryCtxGetState(int, unsigned*, int* active) {
  return *active = !is("FAKE_CUDA_IDLE"), 0;
}

int cuDevicePrimaryCtxRetain(void** context, int) {
  std::lock_guard<std::mutex> lock(mutex);
  return *context = &contexts, ++contexts, 0;
}

int cuDevicePrimaryCtxRelease_v2(int) {
  std::lock_guard<std::mutex> lock(mutex);
  return --contexts, 0;
}

int cuCtxPushCurrent_v2(void*) {
  std::lock_guard<std::mutex> lock(mutex);
  return ++pushed, 0;
}

int cuCtxPopCurrent_v2(void**) {
  std::lock_guard<std::mutex> lock(mutex);
  return --pushed, 0;
}

int cuMemHostRegister_v2(void* at, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(mutex);
  wrong += pushed == 0;
  return locked.emplace(at, bytes).second ? 0 : (++wrong, 712);  // it is locked already
}

int cuMemHostUnregister(void* at) {
  std::lock_guard<std::mutex> lock(mutex);
  if (is("FAKE_CUDA_REFUSES")) return 1;
  return locked.erase(at) == 1 ? 0 : (++wrong, 713);
}

// For the test
size_t fake_cuda_locked() {
  std::lock_guard<std::mutex> lock(mutex);
  size_t bytes = 0;
  for (const auto& one : locked) bytes += one.second;
  return bytes;
}

int fake_cuda_wrong() {
  std::lock_guard<std::mutex> lock(mutex);
  return wrong + contexts + pushed;
}
}
