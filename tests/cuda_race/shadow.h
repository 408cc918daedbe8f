// Who wrote and read each place of memory last.
#pragma once

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clocks.h"

namespace cuda_race {

struct Cell {
  Stamp write, reads[2];  // the second: of another thread, not ordered with the first
  bool content = false;   // something was written
};

// A cell for each word, and in pages with smaller accesses for each byte.
class Shadow {
 public:
  // Calls body(cell, address) for all cells of these bytes.
  template <class Body>
  void each(uintptr_t address, size_t bytes, const Body& body) {
    while (bytes > 0) {
      Page& page = this->page(address / kBytes);
      const size_t offset = address % kBytes, count = std::min(bytes, kBytes - offset);
      if (page.cells.size() < kBytes && (offset % 4 || count % 4)) split(page);
      const size_t each = kBytes / page.cells.size();
      for (size_t i = offset / each; i < (offset + count) / each; ++i)
        body(page.cells[i], address - offset + i * each);
      address += count;
      bytes -= count;
    }
  }

 private:
  static constexpr size_t kBytes = 512;
  struct Page {
    std::vector<Cell> cells;
  };

  static void split(Page& page) {
    std::vector<Cell> cells;
    for (const Cell& cell : page.cells) cells.insert(cells.end(), 4, cell);
    page.cells = std::move(cells);
  }

  Page& page(uintptr_t number) {
    auto& [cached, page] = cache_[number % cache_.size()];
    if (!page || cached != number) {
      cached = number;
      page = &pages_[number];
      if (page->cells.empty()) page->cells.resize(kBytes / 4);
    }
    return *page;
  }

  std::unordered_map<uintptr_t, Page> pages_;
  std::array<std::pair<uintptr_t, Page*>, 64> cache_{};
};

}  // namespace cuda_race
