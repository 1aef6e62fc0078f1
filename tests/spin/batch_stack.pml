// SPDX-License-Identifier: Apache-2.0
// batch_stack.pml - tokens/batch_stack.h in Promela: threads take batches and put them back.
//
// Each statement is one access of the real thing. A thread owns what it took: it must be the
// only one. The tag has three bits here and 32 there.
// -DNO_TAG leaves the tag as it is, which must fail.

#define THREADS 3
#define BATCHES 3
#define ROUNDS 1

byte top = BATCHES;  // batch + 1; 0: empty
byte tag = 0;
byte link[BATCHES];
byte owners[BATCHES];

inline take(batch) {
  batch = 0;
  do
  :: true ->
    d_step { seen_top = top; seen_tag = tag };
    if
    :: seen_top == 0 -> break
    :: else
    fi;
    below = link[seen_top - 1];
    d_step {
      if
      :: top == seen_top && tag == seen_tag ->
        top = below;
#ifndef NO_TAG
        tag = (tag + 1) % 8;
#endif
        batch = seen_top
      :: else
      fi
    };
    if
    :: batch != 0 -> break
    :: else
    fi
  od;
  if
  :: batch != 0 -> owners[batch - 1]++; assert(owners[batch - 1] == 1)
  :: else
  fi
}

inline put(batch) {
  owners[batch - 1]--;
  do
  :: true ->
    d_step { seen_top = top; seen_tag = tag };
    link[batch - 1] = seen_top;
    d_step {
      if
      :: top == seen_top && tag == seen_tag -> top = batch; done = true
      :: else -> done = false
      fi
    };
    if
    :: done -> break
    :: else
    fi
  od
}

// Takes two, then puts them back in the order in which it took them.
proctype worker() {
  byte first, second, seen_top, seen_tag, below;
  bool done;
  byte round = 0;
  do
  :: round == ROUNDS -> break
  :: else ->
    take(first);
    take(second);
    if
    :: first != 0 -> put(first)
    :: else
    fi;
    if
    :: second != 0 -> put(second)
    :: else
    fi;
    round++
  od
}

init {
  byte i = 0;
  byte n = 0;
  atomic {
    do
    :: i == BATCHES -> break
    :: else -> link[i] = i; i++
    od;
    i = 0;
    do
    :: i == THREADS -> break
    :: else -> run worker(); i++
    od
  };
  _nr_pr == 1;
  // All are there again.
  do
  :: top == 0 -> break
  :: else -> top = link[top - 1]; n++; assert(n <= BATCHES)
  od;
  assert(n == BATCHES)
}
