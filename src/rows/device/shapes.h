// The second argument of the row kernels: sizes of the rows, and what a launch adds to them.
#pragma once

#include <cstdint>

namespace matmuls {

struct RowShape {
  int64_t rows;
  int columns;
  bool large;  // the inputs exceed the L2; unused for unaligned rows, which would spill registers
};

// persistent
struct WalkShape : RowShape {
  int stages;  // rows in shared memory, at most 4: one being processed, the others in flight
  bool fours;  // a team takes four consecutive rows at a time
};

// two_pass
struct HeldShape : RowShape {
  int waiting;  // parts of a row that fit in a block's shared memory, besides the remainder
};

// staged
struct TileShape {
  int64_t rows;
  int columns;
  int each, tiles;    // rows per tile, tiles per warp
  int region, stage;  // bytes of shared memory: one tensor of a tile; all tensors of a tile
};

}  // namespace matmuls
