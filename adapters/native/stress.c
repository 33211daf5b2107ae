/* stress.c - the simulated board under many threads and odd calls, for the sanitizers (make check).
 *
 * Writes a small random calbin into a temporary folder, then: threads that submit, wait, poll,
 * cancel and reset on a board with the real clock; waiters against a stepper on the manual clock;
 * close while several threads have jobs in flight; random calls with random arguments, under every
 * kind of fault, over several configurations. The checks are the sanitizers' and a few of its own: states
 * never go back, batch outputs equal those of another board. */
#include "calsim_model.h"
#include "npurt_sim.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  LAYERS = 2,
  HIDDEN = 16,
  HEADS = 2,
  KV_HEADS = 1,
  DIM = 8,
  INNER = 24,
  VOCAB = 64,
  CONTEXT = 32,
  LANES = 8
};
enum { RESERVE = 1, COMMIT, ROLLBACK, RELEASE };
enum { TENSORS = 5, MEMORY = 1 << 16 };

static void require(int condition, const char *what) {
  if (condition) return;
  char text[512] = "";
  npurt_last_error(text, sizeof text);
  fprintf(stderr, "stress: %s (last error: %s)\n", what, text);
  abort();
}
#define REQUIRE(condition) require((condition), #condition)

static uint64_t draw(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return *state >> 33;
}

/* ---- a calbin of random numbers -------------------------------------------------------- */

typedef struct writer {
  char header[16384];
  size_t length;
  uint16_t values[65536];
  size_t count;
  uint64_t random;
} writer;

static void add_tensor(writer *w, const char *name, uint32_t rows, uint32_t columns) {
  size_t first = w->count, number = (size_t)rows * (columns != 0 ? columns : 1);
  for (size_t i = 0; i < number; ++i) {
    float value = ((float)draw(&w->random) / 2147483648.0f - 0.5f) * (columns != 0 ? 0.5f : 1.0f) +
                  (columns != 0 ? 0 : 1);
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    w->values[w->count++] = (uint16_t)(bits >> 16);
  }
  char shape[64];
  if (columns != 0)
    snprintf(shape, sizeof shape, "%u,%u", rows, columns);
  else
    snprintf(shape, sizeof shape, "%u", rows);
  w->length +=
      (size_t)snprintf(w->header + w->length, sizeof w->header - w->length,
                       "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                       w->length > 1 ? "," : "", name, shape, first * 2, w->count * 2);
}

static void add_layer(writer *w, uint32_t layer) {
  static const struct {
    const char *name;
    uint32_t rows, columns;
  } parts[] = {{"input_layernorm.weight", HIDDEN, 0},
               {"post_attention_layernorm.weight", HIDDEN, 0},
               {"self_attn.q_proj.weight", HEADS * DIM, HIDDEN},
               {"self_attn.k_proj.weight", KV_HEADS * DIM, HIDDEN},
               {"self_attn.v_proj.weight", KV_HEADS * DIM, HIDDEN},
               {"self_attn.o_proj.weight", HIDDEN, HEADS * DIM},
               {"self_attn.q_norm.weight", DIM, 0},
               {"self_attn.k_norm.weight", DIM, 0},
               {"mlp.gate_proj.weight", INNER, HIDDEN},
               {"mlp.up_proj.weight", INNER, HIDDEN},
               {"mlp.down_proj.weight", HIDDEN, INNER}};
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; ++i) {
    char name[128];
    snprintf(name, sizeof name, "model.layers.%u.%s", layer, parts[i].name);
    add_tensor(w, name, parts[i].rows, parts[i].columns);
  }
}

static void write_file(const char *folder, const char *name, const void *bytes, size_t length) {
  char path[256];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "wb");
  REQUIRE(file != NULL);
  REQUIRE(fwrite(bytes, 1, length, file) == length);
  REQUIRE(fclose(file) == 0);
  REQUIRE(chmod(path, 0644) == 0);
}

static size_t encode_parameters(writer *w, char **bytes) {
  w->header[w->length++] = '{';
  add_tensor(w, "model.embed_tokens.weight", VOCAB, HIDDEN);
  add_tensor(w, "model.norm.weight", HIDDEN, 0);
  for (uint32_t layer = 0; layer < LAYERS; ++layer) add_layer(w, layer);
  w->header[w->length++] = '}';
  uint64_t header = w->length;
  size_t length = 8 + w->length + w->count * 2;
  *bytes = malloc(length);
  REQUIRE(*bytes != NULL);
  memcpy(*bytes, &header, 8);
  memcpy(*bytes + 8, w->header, w->length);
  memcpy(*bytes + 8 + w->length, w->values, w->count * 2);
  return length;
}

static void write_calbin(const char *folder) {
  writer *w = calloc(1, sizeof *w);
  REQUIRE(w != NULL);
  w->random = 7;
  char *bytes, sha[65], manifest[4096];
  size_t length = encode_parameters(w, &bytes);
  calsim_sha256_hex(bytes, length, sha);
  uint32_t token = LAYERS * 2 * KV_HEADS * DIM * 2, kv = token * CONTEXT * LANES / 2;
  int size = snprintf(
      manifest, sizeof manifest,
      "{\"format\":\"laneway-calbin\",\"format_version\":1,\"name\":\"stress\",\"architecture\":\"qwen3\","
      "\"compiler\":\"stress\",\"needs\":{\"runtime\":\"0.1\",\"driver\":\"0.1\",\"firmware\":\"0.1\"},"
      "\"shape\":{\"layers\":%d,\"hidden\":%d,\"heads\":%d,\"kv_heads\":%d,\"head_dim\":%d,\"intermediate\":%d,"
      "\"experts\":0,\"experts_per_token\":0,\"moe_intermediate\":0,\"norm_topk_prob\":false,\"vocab\":%d,"
      "\"rms_norm_eps\":1e-06,\"rope_theta\":10000.0,\"tied_head\":true},"
      "\"context\":%d,\"lanes\":%d,\"lane_rule\":\"length_zero\",\"kv_layout\":\"all\",\"layout\":\"tp2\","
      "\"chips\":{\"count\":2,\"mask\":3},\"kv\":{\"bytes_per_token\":%u,\"bytes_per_lane\":%u},"
      "\"bytes\":{\"params\":[10000,10000],\"kv\":[%u,%u],\"workspace\":[1000,1000],\"other\":[500,500]},"
      "\"submodels\":[{\"name\":\"decode_b1\",\"task\":\"decode\",\"max_batch\":1,\"max_tokens\":1,"
      "\"incremental_prefill\":false},{\"name\":\"decode_b4\",\"task\":\"decode\",\"max_batch\":4,\"max_tokens\":1,"
      "\"incremental_prefill\":false}],\"eos_token_ids\":[0],"
      "\"files\":{\"model.safetensors\":{\"sha256\":\"%s\",\"bytes\":%zu}}}",
      LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, CONTEXT, LANES, token, token * CONTEXT,
      kv, kv, sha, length);
  REQUIRE(size > 0 && (size_t)size < sizeof manifest);
  write_file(folder, "model.safetensors", bytes, length);
  write_file(folder, "manifest.json", manifest, (size_t)size);
  free(bytes);
  free(w);
}

/* ---- a board and its jobs -------------------------------------------------------------- */

typedef struct board {
  npurt_device *device;
  npurt_calbin *calbin;
  npurt_kvbank *bank;
  uint64_t generation, epoch;
} board;

typedef struct pair {
  npurt_buffer *in, *out;
  void *memory[TENSORS];
} pair;

/* Put the calbin on the device, with a bank; false when it is refused. */
static int configure(board *b) {
  npurt_configure_params params = {.h.struct_size = sizeof params, .timeout_ns = 1000000};
  npurt_configure_result result = {.h.struct_size = sizeof result};
  npurt_kv_params kv = {.h.struct_size = sizeof kv, .layout = 2};
  if (npurt_calbin_configure(b->calbin, &params, &result) != NPURT_OK) return 0;
  REQUIRE(npurt_kv_open(b->calbin, &kv, &b->bank) == NPURT_OK);
  b->generation = result.generation;
  b->epoch = result.device_epoch;
  return 1;
}

static board open_board(const char *folder, const char *config) {
  board b = {0};
  npurt_open_params open = {.h.struct_size = sizeof open, .config = config};
  npurt_calbin_source source = {.h.struct_size = sizeof source, .path = folder};
  REQUIRE(npurt_device_open(&open, &b.device) == NPURT_OK);
  REQUIRE(npurt_calbin_create(b.device, &source, &b.calbin) == NPURT_OK);
  REQUIRE(configure(&b));
  return b;
}

static pair make_pair(const board *b, uint32_t submodel) {
  pair p = {0};
  npurt_buffer_spec in = {.h.struct_size = sizeof in, .submodel = submodel, .direction = 1};
  npurt_buffer_spec out = {.h.struct_size = sizeof out, .submodel = submodel, .direction = 2};
  REQUIRE(npurt_buffer_create(b->calbin, &in, &p.in) == NPURT_OK);
  REQUIRE(npurt_buffer_create(b->calbin, &out, &p.out) == NPURT_OK);
  for (uint32_t i = 0; i < TENSORS; ++i) {
    p.memory[i] = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(p.memory[i] != MAP_FAILED);
    REQUIRE(npurt_buffer_map(i < 3 ? p.in : p.out, i, p.memory[i], MEMORY) == NPURT_OK);
  }
  return p;
}

static void free_pair(pair *p) {
  for (uint32_t i = 0; i < TENSORS; ++i) munmap(p->memory[i], MEMORY);
}

static npurt_status kv_op(const board *b, uint32_t op, uint32_t lane, uint32_t from, uint64_t txn) {
  npurt_kv_op ops = {op, lane, from, from + 1, lane + 1, txn};
  uint32_t bad;
  return npurt_kv_apply(b->bank, &ops, sizeof ops, 1, &bad);
}

static npurt_status start(const board *b, const pair *p, uint32_t lane, uint32_t length,
                          uint64_t txn, npurt_ticket *t) {
  ((int32_t *)p->memory[0])[0] = (int32_t)((lane * 7 + length) % VOCAB);
  ((int32_t *)p->memory[1])[0] = (int32_t)length;
  ((int32_t *)p->memory[2])[0] = 1;
  npurt_lane row = {lane, 1, 1, length, lane + 1};
  npurt_submit_params submit = {.h.struct_size = sizeof submit,
                                .in = p->in,
                                .out = p->out,
                                .kv = b->bank,
                                .lanes = &row,
                                .lane_count = 1,
                                .lane_stride = sizeof row,
                                .expect_generation = b->generation,
                                .expect_epoch = b->epoch,
                                .kv_txn = txn};
  return npurt_job_submit(b->device, &submit, t);
}

/* ---- many threads ---------------------------------------------------------------------- */

typedef struct shared {
  board b;
  atomic_bool stop;
  atomic_uint_fast64_t latest; /* some ticket that was given out */
  atomic_uint ready;           /* submitters with their memory mapped */
} shared;

typedef struct submitter {
  shared *s;
  uint32_t lane, rounds, done;
  pair p;
} submitter;

/* Submit, wait and settle until the rounds are over; a reset may come between any two calls. */
static void *submit_main(void *argument) {
  submitter *me = argument;
  const board *b = &me->s->b;
  pair p = make_pair(b, 0);
  uint32_t length = 0;
  for (uint32_t round = 0; round < me->rounds; ++round) {
    uint64_t txn = (uint64_t)me->lane << 32 | (round + 1);
    if (length == CONTEXT || kv_op(b, RESERVE, me->lane, length, txn) != NPURT_OK) {
      kv_op(b, RELEASE, me->lane, 0, 0); /* full, or unknown after a reset */
      length = 0;
      continue;
    }
    npurt_ticket ticket;
    npurt_status status = start(b, &p, me->lane, length, txn, &ticket);
    if (status != NPURT_OK) {
      REQUIRE(ticket == 0);
      if (kv_op(b, ROLLBACK, me->lane, length, txn) != NPURT_OK)
        kv_op(b, RELEASE, me->lane, 0, 0), length = 0;
      continue;
    }
    atomic_store(&me->s->latest, ticket);
    REQUIRE(npurt_job_wait(b->device, &ticket, 1, NPURT_WAIT_FOREVER, NULL) == NPURT_OK);
    npurt_completion c = {.h.struct_size = sizeof c};
    REQUIRE(npurt_job_result(b->device, ticket, &c) == NPURT_OK);
    bool done = c.state == NPURT_JOB_DONE && kv_op(b, COMMIT, me->lane, length, txn) == NPURT_OK;
    if (done)
      ++length, ++me->done;
    else if (kv_op(b, ROLLBACK, me->lane, length, txn) != NPURT_OK)
      kv_op(b, RELEASE, me->lane, 0, 0), length = 0;
    REQUIRE(npurt_job_retire(b->device, ticket) == NPURT_OK);
  }
  free_pair(&p);
  return NULL;
}

static void *watch_main(void *argument) {
  shared *s = argument;
  npurt_ticket watched = 0;
  uint32_t seen = 0;
  while (!atomic_load(&s->stop)) {
    npurt_health health = {.h.struct_size = sizeof health};
    npurt_counters counters = {.h.struct_size = sizeof counters};
    npurt_event event = {.h.struct_size = sizeof event};
    npurt_job_state state = {.h.struct_size = sizeof state};
    REQUIRE(npurt_device_health(s->b.device, &health) == NPURT_OK);
    REQUIRE(npurt_device_counters(s->b.device, &counters) == NPURT_OK);
    REQUIRE(counters.submitted ==
            counters.left + counters.finished + counters.failed + counters.aborted);
    npurt_device_event(s->b.device, &event);
    npurt_ticket ticket = atomic_load(&s->latest);
    if (ticket != watched) watched = ticket, seen = 0;
    if (npurt_job_poll(s->b.device, ticket, &state) != NPURT_OK) continue;
    REQUIRE(state.state >= seen);
    seen = state.state;
  }
  return NULL;
}

static void *disturb_main(void *argument) {
  shared *s = argument;
  uint64_t random = 3;
  for (uint32_t i = 0; i < 40; ++i) {
    npurt_job_cancel(s->b.device, atomic_load(&s->latest));
    npurt_reset_params reset = {.h.struct_size = sizeof reset, .level = 1};
    npurt_reset_report report = {.h.struct_size = sizeof report};
    if (draw(&random) % 4 == 0) REQUIRE(npurt_reset_run(s->b.device, &reset, &report) == NPURT_OK);
    usleep(500);
  }
  return NULL;
}

static void run_threads(const char *folder) {
  enum { SUBMITTERS = 3, ROUNDS = 300 };
  shared s = {.b = open_board(folder, "clock = real\nscale = 2")};
  REQUIRE(npurt_sim_faults(s.b.device,
                           "fault r kind=reset_slow p=0.5 for=300us\n"
                           "fault h kind=health_block p=0.1 for=300us\n"
                           "fault m kind=memory_skew p=0.5 field=used n=7\n"
                           "fault u kind=unhealthy on=time after=1ms") == NPURT_OK);
  submitter submitters[SUBMITTERS];
  pthread_t threads[SUBMITTERS], watcher, disturber;
  for (uint32_t i = 0; i < SUBMITTERS; ++i) {
    submitters[i] = (submitter){.s = &s, .lane = i, .rounds = ROUNDS};
    REQUIRE(pthread_create(&threads[i], NULL, submit_main, &submitters[i]) == 0);
  }
  REQUIRE(pthread_create(&watcher, NULL, watch_main, &s) == 0);
  REQUIRE(pthread_create(&disturber, NULL, disturb_main, &s) == 0);
  uint32_t done = 0;
  for (uint32_t i = 0; i < SUBMITTERS; ++i) {
    pthread_join(threads[i], NULL);
    done += submitters[i].done;
  }
  pthread_join(disturber, NULL);
  atomic_store(&s.stop, true);
  pthread_join(watcher, NULL);
  REQUIRE(npurt_device_close(s.b.device) == NPURT_OK);
  REQUIRE(done > 0);
  printf("threads: %u jobs done\n", done);
}

/* ---- waiters against a stepper, and close under them ----------------------------------- */

typedef struct waiter {
  npurt_device *device;
  npurt_ticket ticket;
  npurt_status status;
} waiter;

static void *wait_main(void *argument) {
  waiter *me = argument;
  me->status = npurt_job_wait(me->device, &me->ticket, 1, NPURT_WAIT_FOREVER, NULL);
  return NULL;
}

static void run_waiters(const char *folder, bool closes) {
  enum { WAITERS = 4 };
  board b = open_board(folder, "");
  pair p = make_pair(&b, 0);
  npurt_ticket ticket;
  REQUIRE(kv_op(&b, RESERVE, 0, 0, 1) == NPURT_OK);
  REQUIRE(start(&b, &p, 0, 0, 1, &ticket) == NPURT_OK);
  pthread_t threads[WAITERS];
  waiter waiters[WAITERS];
  for (uint32_t i = 0; i < WAITERS; ++i) {
    waiters[i] = (waiter){b.device, ticket, 0};
    REQUIRE(pthread_create(&threads[i], NULL, wait_main, &waiters[i]) == 0);
  }
  REQUIRE(npurt_sim_step(b.device, NPURT_SIM_STEP_TICKET, NPURT_SIM_REACH(ticket, NPURT_JOB_EXEC),
                         NULL) == NPURT_OK);
  if (closes)
    REQUIRE(npurt_device_close(b.device) == NPURT_OK);
  else
    REQUIRE(npurt_sim_step(b.device, NPURT_SIM_STEP_IDLE, 0, NULL) == NPURT_OK);
  for (uint32_t i = 0; i < WAITERS; ++i) {
    pthread_join(threads[i], NULL);
    REQUIRE(waiters[i].status == (closes ? NPURT_E_BAD_HANDLE : NPURT_OK));
  }
  if (!closes) REQUIRE(npurt_device_close(b.device) == NPURT_OK);
  free_pair(&p);
}

/* ---- close with jobs in flight ---------------------------------------------------------- */

/* Submit and wait until the device is gone; another thread closes it. */
static void *outlive_main(void *argument) {
  submitter *me = argument;
  const board *b = &me->s->b;
  const pair p = me->p = make_pair(b, 0);
  atomic_fetch_add(&me->s->ready, 1);
  for (uint32_t length = 0;;) {
    uint64_t txn = (uint64_t)me->lane << 32 | (length + 1);
    npurt_ticket ticket;
    npurt_status status = NPURT_OK;
    if (length < CONTEXT) status = kv_op(b, RESERVE, me->lane, length, txn);
    if (status == NPURT_OK && length < CONTEXT) {
      do status = start(b, &p, me->lane, length, txn, &ticket);
      while (status == NPURT_E_QUEUE_FULL);
    }
    if (status == NPURT_OK && length < CONTEXT)
      status = npurt_job_wait(b->device, &ticket, 1, NPURT_WAIT_FOREVER, NULL);
    if (status == NPURT_OK)
      status = length < CONTEXT ? kv_op(b, COMMIT, me->lane, length, txn)
                                : kv_op(b, RELEASE, me->lane, 0, 0);
    if (status == NPURT_OK && length < CONTEXT) status = npurt_job_retire(b->device, ticket);
    REQUIRE(status == NPURT_OK || status == NPURT_E_BAD_HANDLE);
    if (status != NPURT_OK) return NULL;
    length = length < CONTEXT ? length + 1 : 0;
    ++me->done;
  }
}

static void run_close(const char *folder) {
  enum { SUBMITTERS = 4 };
  shared s = {.b = open_board(folder, "clock = real\nscale = 1")};
  submitter submitters[SUBMITTERS];
  pthread_t threads[SUBMITTERS];
  for (uint32_t i = 0; i < SUBMITTERS; ++i) {
    submitters[i] = (submitter){.s = &s, .lane = i};
    REQUIRE(pthread_create(&threads[i], NULL, outlive_main, &submitters[i]) == 0);
  }
  while (atomic_load(&s.ready) < SUBMITTERS) usleep(100);
  usleep(2000);
  REQUIRE(npurt_device_close(s.b.device) == NPURT_OK);
  for (uint32_t i = 0; i < SUBMITTERS; ++i) {
    pthread_join(threads[i], NULL);
    free_pair(&submitters[i].p);
  }
}

/* ---- random calls ---------------------------------------------------------------------- */

static void call_at_random(const board *b, pair *pairs, npurt_ticket *tickets, uint64_t *random) {
  uint32_t lane = (uint32_t)(draw(random) % (LANES + 1)), length = (uint32_t)(draw(random) % 4),
           i = (uint32_t)(draw(random) % 3);
  npurt_completion completion = {.h.struct_size =
                                     (uint32_t)(draw(random) % 8 == 0 ? 16 : sizeof completion)};
  npurt_reset_params reset = {.h.struct_size = sizeof reset, .level = (uint32_t)(draw(random) % 6)};
  npurt_reset_report report = {.h.struct_size = sizeof report};
  npurt_health health = {.h.struct_size = sizeof health};
  npurt_memory memory = {.h.struct_size = sizeof memory};
  npurt_ticket ticket = 0;
  switch (draw(random) % 16) {
    case 0:
    case 1: kv_op(b, (uint32_t)(draw(random) % 5), lane, length, draw(random) % 3); break;
    case 2:
    case 3:
      kv_op(b, RESERVE, lane, length, 1);
      if (start(b, &pairs[i], lane, length, 1, &ticket) == NPURT_OK) tickets[i] = ticket;
      break;
    case 4:
    case 5:
      npurt_sim_step(b->device, (uint32_t)(draw(random) % 7), draw(random) % 5000, NULL);
      break;
    case 6: npurt_job_retire(b->device, tickets[i]); break;
    case 7: npurt_job_cancel(b->device, tickets[i]); break;
    case 8: npurt_job_result(b->device, tickets[i], &completion); break;
    case 9:
      npurt_buffer_map(pairs[i].in, (uint32_t)(draw(random) % 6),
                       pairs[0].memory[draw(random) % TENSORS], MEMORY);
      break;
    case 10:
      npurt_buffer_slice(pairs[i].out, 3, (uint32_t)(draw(random) % 4),
                         (int64_t)(draw(random) % 3) - 1, 1);
      break;
    case 11: npurt_buffer_restore(pairs[i].in, (uint32_t)(draw(random) % 9)); break;
    case 12:
      if (draw(random) % 40 == 0) npurt_reset_run(b->device, &reset, &report);
      break;
    case 13: npurt_device_health(b->device, &health); break;
    case 14: npurt_device_memory(b->device, (uint32_t)(draw(random) % 3), &memory); break;
    default: npurt_kv_close((npurt_kvbank *)(uintptr_t)(draw(random) << 20)); break;
  }
}

/* Reset the device, give back what can be given back, configure anew; false when that is refused.
 * Memory of jobs that may still write stays where it is, so each life has its own. */
static int rebuild(board *b, pair *pairs, pair *old, npurt_ticket *tickets) {
  npurt_reset_params reset = {.h.struct_size = sizeof reset, .level = 4};
  npurt_reset_report report = {.h.struct_size = sizeof report};
  uint64_t now = 0;
  REQUIRE(npurt_clock_now(b->device, &now) == NPURT_OK);
  npurt_sim_step(b->device, NPURT_SIM_STEP_TIME, now + 50000, NULL);
  npurt_reset_run(b->device, &reset, &report);
  for (uint32_t i = 0; i < 3; ++i) {
    npurt_job_retire(b->device, tickets[i]);
    npurt_buffer_destroy(pairs[i].in);
    npurt_buffer_destroy(pairs[i].out);
  }
  npurt_kv_close(b->bank);
  if (!configure(b)) return 0; /* the life goes on with what is left */
  for (uint32_t i = 0; i < 3; ++i) {
    old[i] = pairs[i];
    pairs[i] = make_pair(b, i == 2);
    tickets[i] = 0;
  }
  return 1;
}

static uint32_t run_random(const char *folder, uint64_t seed) {
  enum { LIVES = 12 };
  uint64_t random = seed;
  board b = open_board(folder, "capture = 1\nreset_interval = 20us\ncancel = any");
  REQUIRE(npurt_sim_faults(b.device,
                           "fault a kind=ccu_exception p=0.1 kv=unknown quiesce=n\n"
                           "fault h kind=hang phase=d2h p=0.02 count=inf release=reset1\n"
                           "fault s kind=submit_reject p=0.1\n"
                           "fault i kind=submit_indeterminate p=0.1 runs=yes\n"
                           "fault j kind=submit_indeterminate p=0.02 runs=no\n"
                           "fault k kind=csr_fail p=0.1 k=3\n"
                           "fault w kind=slow phase=exec p=0.1 factor=3.5\n"
                           "fault e kind=dma_error dir=d2h p=0.1 offset=7\n"
                           "fault f kind=dma_error dir=h2d p=0.05 offset=100000\n"
                           "fault n kind=numeric_nan p=0.1 lanes=0x3\n"
                           "fault l kind=lost_completion p=0.1 poll_sees=y\n"
                           "fault m kind=lost_completion p=0.02 poll_sees=n\n"
                           "fault o kind=late_completion p=0.1 delay=2us\n"
                           "fault q kind=late_dma p=0.5 delay=3us bytes=33\n"
                           "fault b kind=kv_apply_before p=0.05\n"
                           "fault c kind=kv_apply_after p=0.05 partial=y\n"
                           "fault x kind=counter_skew p=0.5 field=left n=-3\n"
                           "fault y kind=counter_stuck field=late skip=9\n"
                           "fault A kind=numeric_garbage p=0.05\n"
                           "fault B kind=numeric_offset p=0.05 n=70\n"
                           "fault C kind=stale_output p=0.05\n"
                           "fault D kind=swapped_output p=0.05\n"
                           "fault E kind=kv_stale p=0.05\n"
                           "fault F kind=kv_swap p=0.05 with=3 pos=2\n"
                           "fault G kind=kv_bit p=0.05\n"
                           "fault H kind=pad_write p=0.5 victim=7\n"
                           "fault I kind=thermal p=0.1 tau=9us\n"
                           "fault J kind=drift p=0.1 percent=5 bytes=10000000\n"
                           "fault K kind=illegal_step p=0.1 from=exec to=done\n"
                           "fault L kind=unhealthy p=0.02\n"
                           "fault M kind=sticky p=0.01 on=d2h release=reset1\n"
                           "fault N kind=device_lost p=0.005 on=h2d\n"
                           "fault O kind=wedged p=0.005\n"
                           "fault P kind=late_completion p=0.1 delay=90us outlives=y\n"
                           "fault Q kind=configure_fail p=0.2\n"
                           "fault R kind=configure_partial_memory p=0.2 release=reset4\n"
                           "fault S kind=configure_hang p=0.2 for=3us\n"
                           "fault T kind=warmup_wrong p=0.2\n"
                           "fault U kind=reset_partial p=0.2 without=aborts_jobs+new_epoch\n"
                           "fault V kind=reset_partial p=0.2 without=quiesces_dma\n"
                           "fault W kind=reset_wide p=0.1 also=drops_config+drops_host_maps\n"
                           "fault X kind=reset_ok_but_dead p=0.1 then=hang\n"
                           "fault Y kind=reset_fail p=0.1\n"
                           "fault Z kind=epoch_bump p=0.01 on=submit\n"
                           "fault t kind=epoch_bump on=time after=40us\n"
                           "fault v kind=owner_change p=0.01 on=health for=30us\n"
                           "fault z kind=leak_until_soft p=0.5 bytes=100") == NPURT_OK);
  REQUIRE(npurt_sim_arm(b.device) == NPURT_OK);
  pair pairs[3] = {make_pair(&b, 0), make_pair(&b, 0), make_pair(&b, 1)}, old[LIVES][3] = {0};
  npurt_ticket tickets[3] = {0};
  uint32_t rebuilt = 0;
  for (uint32_t life = 0; life < LIVES; ++life) {
    for (uint32_t i = 0; i < 300; ++i) call_at_random(&b, pairs, tickets, &random);
    rebuilt += rebuild(&b, pairs, old[life], tickets) != 0;
  }
  REQUIRE(npurt_device_close(b.device) == NPURT_OK); /* with jobs, buffers and a bank alive */
  for (uint32_t i = 0; i < 3; ++i) free_pair(&pairs[i]);
  for (uint32_t life = 0; life < LIVES; ++life)
    for (uint32_t i = 0; i < 3; ++i)
      if (old[life][i].memory[0] != NULL) free_pair(&old[life][i]);
  return rebuilt;
}

int main(void) {
  char folder[] = "/tmp/calsim-stress-XXXXXX", path[256];
  REQUIRE(mkdtemp(folder) != NULL);
  write_calbin(folder);
  run_threads(folder);
  for (uint32_t i = 0; i < 10; ++i) {
    run_waiters(folder, false);
    run_waiters(folder, true);
  }
  for (uint32_t i = 0; i < 10; ++i) run_close(folder);
  uint32_t rebuilt = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) rebuilt += run_random(folder, seed);
  REQUIRE(rebuilt > 0);
  printf("random: %u times configured anew\n", rebuilt);
  snprintf(path, sizeof path, "%s/manifest.json", folder);
  unlink(path);
  snprintf(path, sizeof path, "%s/model.safetensors", folder);
  unlink(path);
  rmdir(folder);
  puts("stress: ok");
  return 0;
}
