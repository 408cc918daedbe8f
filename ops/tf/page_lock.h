// Locks memory for a GPU, which then copies from it by itself, at the rate of the bus: from pages
// that the kernel may move, the driver copies by way of a buffer of its own.
//
// By CUDA's driver, which TensorFlow has loaded if it uses a GPU: what is built without CUDA locks
// pages, too.
#pragma once

#include <dlfcn.h>

#include <cstddef>

namespace tfcommx {

class PageLock {
 public:
  // True if the pages are locked. False without a GPU that this process uses, or if the driver
  // refuses: the memory serves as it is.
  static bool lock(void* at, size_t bytes) {
    constexpr unsigned kForAllContexts = 1;
    return with_context(
        [&](const Driver& driver) { return driver.lock(at, bytes, kForAllContexts) == 0; });
  }

  static bool unlock(void* at) {
    return with_context([&](const Driver& driver) { return driver.unlock(at) == 0; });
  }

 private:
  struct Driver {
    int (*count)(int*);
    int (*state)(int, unsigned*, int*);
    int (*retain)(void**, int);
    int (*release)(int);
    int (*push)(void*);
    int (*pop)(void**);
    int (*lock)(void*, size_t, unsigned);
    int (*unlock)(void*);
  };

  // Null where no driver is loaded.
  static const Driver* driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return nullptr;
    static Driver found;
    static const bool complete = [&] {
      return find(library, "cuDeviceGetCount", &found.count) &&
             find(library, "cuDevicePrimaryCtxGetState", &found.state) &&
             find(library, "cuDevicePrimaryCtxRetain", &found.retain) &&
             find(library, "cuDevicePrimaryCtxRelease_v2", &found.release) &&
             find(library, "cuCtxPushCurrent_v2", &found.push) &&
             find(library, "cuCtxPopCurrent_v2", &found.pop) &&
             find(library, "cuMemHostRegister_v2", &found.lock) &&
             find(library, "cuMemHostUnregister", &found.unlock);
    }();
    return complete ? &found : nullptr;
  }

  template <class Function>
  static bool find(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    return *function != nullptr;
  }

  // Calls body in the context that TensorFlow has made on this process's GPU. None is made here: on
  // the GPU of another rank it would take memory.
  template <class Body>
  static bool with_context(const Body& body) {
    const Driver* const driver = PageLock::driver();
    int devices = 0;
    if (driver == nullptr || driver->count(&devices) != 0) return false;
    for (int device = 0; device < devices; ++device) {
      unsigned flags = 0;
      int active = 0;
      void* context = nullptr;
      if (driver->state(device, &flags, &active) != 0 || !active) continue;
      if (driver->retain(&context, device) != 0) return false;
      bool done = false;
      if (driver->push(context) == 0) {
        done = body(*driver);
        driver->pop(&context);
      }
      driver->release(device);
      return done;
    }
    return false;
  }
};

}  // namespace tfcommx
