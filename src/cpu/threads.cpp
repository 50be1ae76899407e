// Ends OpenMP's threads before a fork(). The parent restarts them with its next parallel region; the child has one
// thread until torch.set_num_threads sets more.
//
// A forked child has only the thread that forked, which GNU's OpenMP does not know: with the parent's copied thread
// pool, the child's next parallel region (here, in torch or in MKL) waits forever. So the pool is ended first with
// OpenMP's own call. Pools of other threads do not reach the child. OpenBLAS does the same with its threads. LLVM's and
// Intel's OpenMP restart in a child by themselves, and fail if that call is made within fork().
#include "cpu/threads.h"

#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

// torch loads the OpenMP libraries; missing functions are null.
#pragma weak omp_pause_resource_all
extern "C" {
[[gnu::weak]] void GOMP_PLUGIN_malloc();  // exists in GNU's OpenMP only
[[gnu::weak]] int MKL_Set_Num_Threads_Local(int count);
}

namespace matmuls {
namespace {

std::atomic<bool> used_threads{false};  // the forking thread's pool had threads

// Counts threads that are not ending: the kernel lists a thread for some microseconds after it was joined. 0 without
// /proc.
int count_living() noexcept try {
  constexpr unsigned kExiting = 4;  // PF_EXITING of <linux/sched.h>
  int count = 0;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(thread.path() / "stat");
    const std::string all{std::istreambuf_iterator<char>(file), {}};
    unsigned flags = kExiting;  // proc(5): the seventh field after the name in parentheses
    std::sscanf(all.c_str() + all.rfind(')') + 1, " %*c %*d %*d %*d %*d %*d %u", &flags);
    count += !(flags & kExiting);
  }
  return count;
} catch (const std::exception&) {
  return 0;
}

void before_fork() noexcept {
  // A thread adopts torch's thread number once, recorded in a flag in torch and one in this library. Do it here:
  // otherwise the child would adopt its parent's number.
  at::get_num_threads();
  at::internal::lazy_init_num_threads();
  const int before = used_threads ? 0 : count_living();
  omp_pause_resource_all(omp_pause_hard);  // no effect within a parallel region, where fork() is not called
  if (before > 0 && count_living() < before) used_threads = true;
}

// One thread, as in a worker of torch's DataLoader. at::set_num_threads takes locks that another thread may have held.
void in_child() {
  if (!used_threads) return;
  omp_set_num_threads(1);
  if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(1);
}

template <class F>
const void* library_of(F* function) {
  Dl_info info;
  return function && dladdr(reinterpret_cast<const void*>(function), &info) ? info.dli_fbase : nullptr;
}

bool watch_forks() {
  const void* const library = library_of(omp_pause_resource_all);
  return library && library == library_of(GOMP_PLUGIN_malloc) && pthread_atfork(before_fork, nullptr, in_child) == 0;
}

[[maybe_unused]] const bool watching = watch_forks();

}  // namespace
}  // namespace matmuls
