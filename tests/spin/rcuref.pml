// SPDX-License-Identifier: Apache-2.0
// rcuref.pml - tokens/rcuref.h in Promela, with the life of the object around it.
//
// Each statement below is one access of the real thing. The zones are as there, but narrow:
//
//   0 .. 3   1 .. 4 references     4 .. 13   saturated     14 .. 22   dead     23   none
//
// The last holder waits for a grace period (every section that has begun is over) and frees.
// Broken variants, which must fail:
//   -DPUT_OUTSIDE    the updater's put is in no section
//   -DNO_EXCHANGE    the last put stores "dead" without making sure that it is still "none"
// -DSATURATE starts at the limit: whatever happens, the object is never freed.

#define MAX 3
#define SATURATED 8
#define DEAD_ZONE 14
#define DEAD 18
#define NONE 23
#define WORDS 24

#ifdef SATURATE
#define START MAX
#else
#define START 0
#endif

#define READERS 3
#define THREADS 4  // the last is the updater

byte word = START;
bool published = true;
bool freed = false;
byte deaths = 0;
byte section[THREADS];  // counts; odd: in one

inline touch() { assert(!freed) }

inline get(held) {
  atomic { touch(); word = (word + 1) % WORDS; held = word <= MAX }
  if
  :: held
  :: else ->
    touch(); seen = word;
    if
    :: seen <= MAX -> held = true
    :: seen > MAX && seen < DEAD_ZONE -> atomic { touch(); word = SATURATED }; held = true
    :: seen >= DEAD_ZONE -> atomic { touch(); word = DEAD }
    fi
  fi
}

inline put(last) {
  atomic { touch(); word = (word + WORDS - 1) % WORDS; last = word > MAX }
  if
  :: !last
  :: else ->
    last = false;
    touch(); seen = word;
    if
    :: seen == NONE ->
#ifdef NO_EXCHANGE
      atomic { touch(); word = DEAD; last = true }
#else
      atomic {
        touch();
        if
        :: word == NONE -> word = DEAD; last = true
        :: else
        fi
      }
#endif
    :: seen <= MAX
    :: seen > MAX && seen < DEAD_ZONE -> atomic { touch(); word = SATURATED }
    :: seen >= DEAD_ZONE && seen != NONE -> atomic { touch(); word = DEAD }
    fi
  fi
}

// Waits until each section that has begun is over, and frees.
inline end_life() {
  deaths++;
  other = 0;
  do
  :: other == THREADS -> break
  :: else ->
    seen = section[other];
    if
    :: seen % 2 == 0
    :: else -> section[other] != seen
    fi;
    other++
  od;
  assert(!freed);
  freed = true
}

proctype reader(byte me) {
  byte seen, other;
  bool held, last = false;
  section[me]++;
  if
  :: published ->
    get(held);
    if
    :: held -> touch(); put(last)
    :: else
    fi
  :: else
  fi;
  section[me]++;
  if
  :: last -> end_life()
  :: else
  fi
}

proctype updater(byte me) {
  byte seen, other;
  bool last = false;
#ifndef PUT_OUTSIDE
  section[me]++;
#endif
  published = false;
  put(last);
#ifndef PUT_OUTSIDE
  section[me]++;
#endif
  if
  :: last -> end_life()
  :: else
  fi
}

init {
  byte i = 0;
  atomic {
    do
    :: i == READERS -> break
    :: else -> run reader(i); i++
    od;
    run updater(READERS)
  };
  _nr_pr == 1;
#ifdef SATURATE
  assert(deaths == 0 && !freed)
#else
  assert(deaths == 1 && freed)
#endif
}
