/* calsim_jobs.c - the contract of one job: submit, poll, wait, result, cancel, retire. How a job
 * moves: calsim_engine.c. */
#include "calsim_internal.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_WAIT_TICKETS = 1024 };

calsim_job *calsim_job_of(const calsim_device *d, npurt_ticket ticket) {
  for (uint32_t i = 0; i < d->job_count; ++i)
    if (d->jobs[i]->ticket == ticket) return d->jobs[i];
  calsim_error(NPURT_E_STALE_TICKET, "ticket %llu is not of this device, or retired",
               (unsigned long long)ticket);
  return NULL;
}

uint32_t calsim_in_flight(const calsim_device *d) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < d->job_count; ++i) count += d->jobs[i]->state < NPURT_JOB_DONE;
  return count;
}

const calsim_job *calsim_job_on_lane(const calsim_device *d, const calsim_bank *bank, uint32_t lane,
                                     bool terminal_is_enough) {
  uint32_t settled =
      terminal_is_enough ? CALSIM_FLAG_TERMINAL : CALSIM_FLAG_TERMINAL | CALSIM_FLAG_QUIESCENT;
  for (uint32_t i = 0; i < d->job_count; ++i) {
    const calsim_job *job = d->jobs[i];
    if (job->bank != bank || (job->flags & settled) == settled) continue;
    for (uint32_t row = 0; row < job->row_count; ++row)
      if (job->rows[row].active && job->rows[row].lane == lane) return job;
  }
  return NULL;
}

void calsim_job_free(calsim_job *job) {
  free(job->damage.saved);
  free(job->capture.logits);
  free(job->capture.route_idx);
  free(job->capture.route_weight);
  free(job);
}

/* ---- submit ---------------------------------------------------------------------------- */

static npurt_status check_current(calsim_device *d, const npurt_submit_params *p) {
  if (d->resetting || d->configuring)
    return calsim_error(NPURT_E_BAD_STATE, "a reset or a configuration is running");
  npurt_status status = calsim_check_owner(d);
  if (status != NPURT_OK) return status;
  if (d->sticky != NPURT_OK) return calsim_error(d->sticky, "the device refuses every job");
  if (p->expect_epoch != d->epoch)
    return calsim_error(NPURT_E_STALE_EPOCH, "built for epoch %llu; the device is in %llu",
                        (unsigned long long)p->expect_epoch, (unsigned long long)d->epoch);
  uint64_t generation = d->configured != NULL ? d->configured->generation : 0;
  if (generation == 0 || p->expect_generation != generation)
    return calsim_error(NPURT_E_STALE_GENERATION, "built for generation %llu; the device has %llu",
                        (unsigned long long)p->expect_generation, (unsigned long long)generation);
  if (d->job_count == CALSIM_MAX_JOBS)
    return calsim_error(NPURT_E_QUEUE_FULL, "%d jobs are not retired", CALSIM_MAX_JOBS);
  return NPURT_OK;
}

static npurt_status take_objects(calsim_device *d, const npurt_submit_params *p, calsim_job *job) {
  calsim_buffer *in = calsim_find_object(d, p->in, CALSIM_BUFFER);
  calsim_buffer *out = in != NULL ? calsim_find_object(d, p->out, CALSIM_BUFFER) : NULL;
  calsim_bank *bank = out != NULL ? calsim_find_object(d, p->kv, CALSIM_BANK) : NULL;
  if (bank == NULL) return NPURT_E_BAD_HANDLE;
  const calsim_calbin *c = d->configured;
  if (in->generation != c->generation || out->generation != c->generation ||
      bank->generation != c->generation || calsim_bank_lost(bank))
    return calsim_error(NPURT_E_STALE_GENERATION,
                        "a buffer or the KV bank is of another generation");
  if (in->direction != CALSIM_IN || out->direction != CALSIM_OUT || in->submodel != out->submodel)
    return calsim_error(NPURT_E_INVALID_ARG, "needs an input and an output buffer of one submodel");
  if (in->job != NULL || out->job != NULL)
    return calsim_error(NPURT_E_OBJECT_IN_FLIGHT, "a buffer is held by job %llu",
                        (unsigned long long)(in->job != NULL ? in->job : out->job)->ticket);
  job->in = in;
  job->out = out;
  job->bank = bank;
  job->calbin = d->configured;
  job->submodel = &c->m->submodels[in->submodel];
  for (uint32_t tensor = 0; tensor < CALSIM_TENSORS; ++tensor) {
    job->views[tensor] = (tensor < CALSIM_LOGITS ? in : out)->views[tensor];
    if (job->views[tensor].host == NULL && tensor != CALSIM_DIGEST)
      return calsim_error(NPURT_E_BAD_STATE, "tensor %s is not mapped",
                          calsim_tensor_of(c->m, job->submodel, tensor).name);
  }
  return NPURT_OK;
}

static npurt_status check_active(const calsim_job *job, const npurt_lane *row, uint32_t i) {
  const calsim_manifest *m = job->calbin->m;
  const calsim_lane *lane = &job->bank->lanes[row->lane];
  if (row->tokens == 0 || row->tokens > job->submodel->max_tokens)
    return calsim_error(NPURT_E_INVALID_ARG, "row %u: %u tokens; the submodel takes 1 to %u", i,
                        row->tokens, job->submodel->max_tokens);
  if (row->kv_len > m->context || row->tokens > m->context - row->kv_len)
    return calsim_error(NPURT_E_INVALID_ARG, "row %u: %u + %u tokens are beyond the context of %u",
                        i, row->kv_len, row->tokens, m->context);
  if (job->submodel->task == 1 && row->kv_len > 0 && !job->submodel->incremental_prefill)
    return calsim_error(NPURT_E_UNSUPPORTED, "row %u: the submodel does not continue a prefill", i);
  if (!lane->bound || lane->seq_tag != row->seq_tag || lane->certainty != CALSIM_KNOWN ||
      lane->txn == 0)
    return calsim_error(
        NPURT_E_BAD_STATE,
        "row %u: lane %u is not reserved for sequence %llu, or its content is unknown", i,
        row->lane, (unsigned long long)row->seq_tag);
  if (lane->committed != row->kv_len || lane->reserved != row->kv_len + row->tokens)
    return calsim_error(
        NPURT_E_BAD_STATE, "row %u: lane %u is reserved from %u to %u, the job goes from %u to %u",
        i, row->lane, lane->committed, lane->reserved, row->kv_len, row->kv_len + row->tokens);
  if (calsim_job_on_lane(job->device, job->bank, row->lane, false) != NULL)
    return calsim_error(NPURT_E_OBJECT_IN_FLIGHT, "row %u: lane %u is in flight", i, row->lane);
  return NPURT_OK;
}

static npurt_status take_row(calsim_job *job, const npurt_lane *row, uint32_t i, uint64_t txn) {
  if (row->active > 1)
    return calsim_error(NPURT_E_INVALID_ARG, "row %u: active is %u", i, row->active);
  if (!row->active) {
    if (job->calbin->m->lane_rule == CALSIM_RULE_UNDEFINED)
      return calsim_error(NPURT_E_LANE_RULE, "row %u is inactive; the calbin has no rule for that",
                          i);
    if (row->tokens != 0)
      return calsim_error(NPURT_E_LANE_RULE, "row %u is inactive and must have no tokens", i);
    return NPURT_OK;
  }
  if (row->lane >= job->bank->lane_count)
    return calsim_error(NPURT_E_INVALID_ARG, "row %u: lane %u of %u", i, row->lane,
                        job->bank->lane_count);
  for (uint32_t other = 0; other < i; ++other)
    if (job->rows[other].active && job->rows[other].lane == row->lane)
      return calsim_error(NPURT_E_INVALID_ARG, "rows %u and %u share lane %u", other, i, row->lane);
  npurt_status status = check_active(job, row, i);
  if (status != NPURT_OK || job->bank->lanes[row->lane].txn == txn) return status;
  return calsim_error(NPURT_E_BAD_STATE, "row %u: lane %u is reserved by txn %llu, not by %llu", i,
                      row->lane, (unsigned long long)job->bank->lanes[row->lane].txn,
                      (unsigned long long)txn);
}

/* Where rows are fixed to lanes: row i of the job is i behind a multiple of the batch. */
static npurt_status check_fixed_rows(const calsim_job *job) {
  uint32_t batch = job->submodel->max_batch, first = UINT32_MAX;
  if (!job->calbin->m->fixed_rows) return NPURT_OK;
  for (uint32_t row = 0; row < job->row_count; ++row) {
    uint32_t lane = job->rows[row].lane;
    if (!job->rows[row].active) continue;
    if (first == UINT32_MAX) first = lane / batch * batch;
    if (lane != first + row)
      return calsim_error(NPURT_E_LANE_RULE, "row %u has lane %u; the calbin wants lane %u there",
                          row, lane, first + row);
  }
  return NPURT_OK;
}

/* Copy and check the rows; fills the sizes that the cost model asks for. */
static npurt_status take_rows(const npurt_submit_params *p, calsim_job *job, calsim_work *work) {
  uint32_t most = job->in->rows < job->out->rows ? job->in->rows : job->out->rows;
  if (p->lanes == NULL || p->lane_count == 0 || p->lane_count > most)
    return calsim_error(NPURT_E_INVALID_ARG, "%u rows; the buffers have 1 to %u", p->lane_count,
                        most);
  if (p->lane_stride < CALSIM_ABI01(npurt_lane))
    return calsim_error(NPURT_E_STRUCT_SIZE, "lane_stride %u is too small", p->lane_stride);
  if (job->calbin->m->lane_rule == CALSIM_RULE_UNDEFINED &&
      p->lane_count < job->submodel->max_batch)
    return calsim_error(NPURT_E_LANE_RULE, "%u of %u rows; the calbin has no rule for the others",
                        p->lane_count, job->submodel->max_batch);
  for (uint32_t i = 0; i < p->lane_count; ++i) {
    npurt_lane row;
    memcpy(&row, (const uint8_t *)p->lanes + (uint64_t)p->lane_stride * i, sizeof row);
    npurt_status status = take_row(job, &row, i, p->kv_txn);
    if (status != NPURT_OK) return status;
    job->rows[i] = row;
    ++job->row_count;
    if (!row.active) continue;
    ++work->rows;
    work->tokens += row.tokens;
    work->context_sum += row.kv_len + row.tokens;
    work->attended +=
        (uint64_t)row.tokens * row.kv_len + (uint64_t)row.tokens * (row.tokens + 1) / 2;
  }
  if (work->rows == 0) return calsim_error(NPURT_E_INVALID_ARG, "no active row");
  return check_fixed_rows(job);
}

/* The registers: only lane rule mask_csr has one, whether a row is active. A row that the job does
 * not have is masked out by that. */
static npurt_status take_csrs(const npurt_submit_params *p, const calsim_job *job) {
  bool masked[CALSIM_MAX_ROWS] = {false};
  if (p->csr_count == 0 && job->calbin->m->lane_rule != CALSIM_RULE_MASK_CSR) return NPURT_OK;
  if (job->calbin->m->lane_rule != CALSIM_RULE_MASK_CSR)
    return calsim_error(NPURT_E_NOT_FOUND, "the submodel has no CSR");
  if (p->csr_count > CALSIM_MAX_ROWS || (p->csrs == NULL && p->csr_count > 0))
    return calsim_error(NPURT_E_INVALID_ARG, "%u register values", p->csr_count);
  if (p->csr_count > 0 && p->csr_stride < CALSIM_ABI01(npurt_csr_value))
    return calsim_error(NPURT_E_STRUCT_SIZE, "csr_stride %u is too small", p->csr_stride);
  for (uint32_t i = 0; i < p->csr_count; ++i) {
    npurt_csr_value csr;
    memcpy(&csr, (const uint8_t *)p->csrs + (uint64_t)p->csr_stride * i, sizeof csr);
    if (csr.id != CALSIM_ROW_ACTIVE)
      return calsim_error(NPURT_E_NOT_FOUND, "the submodel has no CSR %u", csr.id);
    if (csr.lane >= job->row_count || csr.value > 1)
      return calsim_error(NPURT_E_INVALID_ARG, "row_active of row %u of %u is %llu", csr.lane,
                          job->row_count, (unsigned long long)csr.value);
    masked[csr.lane] = csr.value == 0;
  }
  for (uint32_t row = 0; row < job->row_count; ++row)
    if (masked[row] == (job->rows[row].active != 0))
      return calsim_error(NPURT_E_LANE_RULE, "row %u: the register row_active contradicts the job",
                          row);
  return NPURT_OK;
}

/* Every row of the job must lie within the slices, and no range may overlap what is in flight. */
static npurt_status check_views(calsim_device *d, calsim_job *job) {
  uint32_t widest = 0;
  for (uint32_t i = 0; i < job->row_count; ++i)
    if (job->rows[i].active && job->rows[i].tokens > widest) widest = job->rows[i].tokens;
  for (uint32_t tensor = 0; tensor < CALSIM_TENSORS; ++tensor) {
    const calsim_view *view = &job->views[tensor];
    calsim_tensor t = calsim_tensor_of(job->calbin->m, job->submodel, tensor);
    if (view->host == NULL) continue;
    bool per_token = tensor == CALSIM_TOKENS || tensor == CALSIM_POSITIONS;
    if (view->row_count < job->row_count || (per_token && view->column_count < widest))
      return calsim_error(NPURT_E_INVALID_ARG, "the slice of %s is smaller than the job", t.name);
    uint64_t bytes = (uint64_t)view->row_count * view->column_count * t.element_bytes;
    if (t.direction == CALSIM_IN)
      job->bytes_in += bytes;
    else
      job->bytes_out += bytes;
    const calsim_job *holder = calsim_overlaps_in_flight(d, view, t.direction);
    bool overlap = holder != NULL;
    for (uint32_t other = 0; other < CALSIM_TENSORS;
         ++other) /* outputs against all others of this job */
      if (t.direction == CALSIM_OUT && other != tensor)
        overlap |= calsim_views_overlap(view, &job->views[other]);
    if (!overlap) continue;
    calsim_violation(d, holder, NPURT_E_RANGE_OVERLAP,
                     "RANGE_OVERLAP tensor %s: submitted over memory in flight", t.name);
    return calsim_error(NPURT_E_RANGE_OVERLAP, "the memory of %s overlaps other memory in flight",
                        t.name);
  }
  return NPURT_OK;
}

static bool engine_taken(const calsim_device *d, uint32_t engine) {
  for (uint32_t i = 0; i < d->job_count; ++i)
    if (d->jobs[i]->state < NPURT_JOB_DONE && d->jobs[i]->engine == engine) return true;
  return false;
}

static npurt_status choose_engine(const calsim_device *d, uint32_t asked, calsim_job *job) {
  if (asked > CALSIM_BANKS) return calsim_error(NPURT_E_INVALID_ARG, "engine mode %u", asked);
  uint32_t wishes[] = {asked, job->in->engine, job->out->engine}, engine = 0;
  for (uint32_t i = 0; i < 3; ++i) {
    if (wishes[i] == 0) continue;
    if (engine != 0 && wishes[i] != engine)
      return calsim_error(NPURT_E_INVALID_ARG, "ping and pong asked for at once");
    engine = wishes[i];
  }
  if (engine == 0) engine = engine_taken(d, 1) ? 2 : 1;
  if (calsim_in_flight(d) >= d->in_flight_ceiling || engine_taken(d, engine))
    return calsim_error(NPURT_E_QUEUE_FULL,
                        "%u jobs in flight; %s is taken or the ceiling of %u reached",
                        calsim_in_flight(d), engine == 1 ? "ping" : "pong", d->in_flight_ceiling);
  job->engine = engine;
  return NPURT_OK;
}

/* Is this fault of a submit one of the board under it? The submit meets what it left. */
static bool changes_device(const calsim_rule *rule) {
  return rule->kind == CALSIM_EPOCH_BUMP || rule->kind == CALSIM_OWNER_CHANGE ||
         (rule->kind >= CALSIM_UNHEALTHY && rule->kind <= CALSIM_DEVICE_LOST);
}

/* Everything that can refuse a submit, in the order of the contract. */
static npurt_status prepare(calsim_device *d, const npurt_submit_params *p, calsim_job *job) {
  calsim_work work = {0};
  npurt_status status = check_current(d, p);
  if (status == NPURT_OK) status = take_objects(d, p, job);
  if (status == NPURT_OK) status = take_rows(p, job, &work);
  if (status == NPURT_OK) status = take_csrs(p, job);
  if (status == NPURT_OK) status = choose_engine(d, p->engine_mode, job);
  if (status == NPURT_OK) status = check_views(d, job);
  if (status != NPURT_OK) return status;
  job->ordinal = d->next_ordinal + 1;
  const calsim_rule *rule = calsim_job_fault_at(d, CALSIM_AT_SUBMIT, job);
  if (rule != NULL && changes_device(rule)) {
    calsim_carry_device(d, rule);
    status = check_current(d, p);
    if (status != NPURT_OK) return status;
    rule = NULL;
  }
  if (rule != NULL && rule->kind == CALSIM_SUBMIT_REJECT)
    return calsim_error(rule->code, "rejected by fault %s", rule->id);
  if (rule != NULL && rule->kind == CALSIM_CSR_FAIL)
    return calsim_error(NPURT_E_CSR_FAILED, "register %u is not set, by fault %s", rule->number,
                        rule->id);
  job->doubtful = rule != NULL;
  job->never_runs = rule != NULL && !rule->runs;
  work.bytes_in = job->bytes_in;
  work.decodes = job->submodel->task == 2;
  job->cost = calsim_job_cost(&d->config, &work);
  bool captures = d->config.capture && d->config.profile != CALSIM_PROFILE_NULL;
  return captures ? calsim_capture_allocate(job) : NPURT_OK;
}

static void accept(calsim_device *d, const npurt_submit_params *p, calsim_job *job,
                   uint64_t submit_ns) {
  job->ticket = calsim_next_ticket();
  ++d->next_ordinal;
  job->client_tag = p->client_tag;
  job->kv_txn = p->kv_txn;
  job->priority = p->priority;
  job->generation = job->calbin->generation;
  job->epoch = d->epoch;
  job->state = NPURT_JOB_QUEUED;
  bool real = d->config.clock == CALSIM_CLOCK_REAL;
  job->times = (npurt_times){
      .clock = real ? 2 : 3, .valid = 3, .submit = submit_ns, .accept = calsim_now(d)};
  calsim_check_submit(d, job);
  job->in->job = job->out->job = job;
  ++job->in->job_count;
  ++job->out->job_count;
  job->in->restored = job->out->restored = 0;
  d->jobs[d->job_count++] = job;
  ++d->totals.submitted;
  d->last_progress_ns = job->times.accept;
  d->level1_done = false;
  calsim_trace(d, "submit job=%llu engine=%u submodel=%s rows=%u first_lane=%u kv_len=%u tokens=%u",
               (unsigned long long)job->ordinal, job->engine, job->submodel->name, job->row_count,
               job->rows[0].lane, job->rows[0].kv_len, job->rows[0].tokens);
  if (job->doubtful)
    calsim_trace(d, "submit doubtful job=%llu runs=%d", (unsigned long long)job->ordinal,
                 !job->never_runs);
  calsim_engine_next(d);
}

npurt_status npurt_job_submit(npurt_device *handle, const npurt_submit_params *p,
                              npurt_ticket *out) {
  if (out == NULL) return calsim_error(NPURT_E_INVALID_ARG, "job_submit: out is NULL");
  *out = 0;
  npurt_status status = CALSIM_CHECK(p, npurt_submit_params);
  if (status != NPURT_OK) return status;
  calsim_job *job = calloc(1, sizeof *job);
  if (job == NULL) return calsim_error(NPURT_E_HOST_MEMORY, "out of host memory");
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) {
    free(job);
    return NPURT_E_BAD_HANDLE;
  }
  job->device = d;
  uint64_t submit_ns = calsim_now(d);
  status = prepare(d, p, job);
  if (status == NPURT_OK) {
    accept(d, p, job, submit_ns);
    *out = job->ticket;
    if (job->doubtful)
      status = calsim_error(NPURT_E_SUBMIT_INDETERMINATE, "ticket %llu may have been queued",
                            (unsigned long long)job->ticket);
  } else {
    calsim_trace(d, "submit refused code=0x%04x", (unsigned)status);
  }
  calsim_unlock(d);
  if (*out == 0) calsim_job_free(job);
  return status;
}

/* ---- after submit ---------------------------------------------------------------------- */

/* A state that the job is not in, where a fault wants it. */
static void show_illegal_step(calsim_device *d, const calsim_job *job, npurt_job_state *state) {
  const calsim_rule *rule = calsim_job_fault_at(d, CALSIM_AT_POLL, job);
  if (rule == NULL) return;
  state->state = rule->to;
  if (rule->to == NPURT_JOB_DONE)
    state->h.flags |= CALSIM_FLAG_TERMINAL | CALSIM_FLAG_QUIESCENT | CALSIM_FLAG_OUTPUT_VALID;
}

npurt_status npurt_job_poll(npurt_device *handle, npurt_ticket ticket, npurt_job_state *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_job_state);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  const calsim_job *job = calsim_job_of(d, ticket);
  npurt_job_state state = {0};
  if (job != NULL)
    state = (npurt_job_state){.h.flags = job->flags,
                              .ticket = job->ticket,
                              .state = job->state,
                              .status = job->status,
                              .generation = job->generation,
                              .device_epoch = job->epoch};
  if (job != NULL && job->state < NPURT_JOB_DONE) show_illegal_step(d, job, &state);
  calsim_unlock(d);
  if (job == NULL) return NPURT_E_STALE_TICKET;
  calsim_put(out, &state, sizeof state);
  return NPURT_OK;
}

static npurt_status find_terminal(const calsim_device *d, const npurt_ticket *t, uint32_t n,
                                  uint32_t *which) {
  for (uint32_t i = 0; i < n; ++i) {
    const calsim_job *job = calsim_job_of(d, t[i]);
    if (job == NULL) return NPURT_E_STALE_TICKET;
    if (job->state < NPURT_JOB_DONE || job->unseen_by_wait) continue;
    *which = i;
    return NPURT_OK;
  }
  return NPURT_E_WAIT_TIMEOUT;
}

/* Sleep until something changes or the device clock reaches the deadline. The manual clock moves
 * only by a change. */
static void wait_for_change(calsim_device *d, uint64_t deadline) {
  if (d->config.clock != CALSIM_CLOCK_REAL || deadline == UINT64_MAX) {
    pthread_cond_wait(&d->changed, &d->lock);
    return;
  }
  struct timespec until = calsim_host_time(d, deadline);
  pthread_cond_timedwait(&d->changed, &d->lock, &until);
}

npurt_status npurt_job_wait(npurt_device *handle, const npurt_ticket *t, uint32_t n,
                            uint64_t timeout_ns, uint32_t *which) {
  if (t == NULL || n == 0 || n > MAX_WAIT_TICKETS)
    return calsim_error(NPURT_E_INVALID_ARG, "job_wait: 1 to %d tickets", MAX_WAIT_TICKETS);
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  uint64_t begin = calsim_now(d);
  uint64_t deadline = timeout_ns > UINT64_MAX - begin ? UINT64_MAX : begin + timeout_ns;
  uint32_t found = 0;
  npurt_status status;
  while ((status = find_terminal(d, t, n, &found)) == NPURT_E_WAIT_TIMEOUT && !d->closing &&
         calsim_now(d) < deadline)
    wait_for_change(d, deadline);
  if (status == NPURT_E_WAIT_TIMEOUT)
    status = d->closing ? calsim_error(NPURT_E_BAD_HANDLE, "the device was closed during the wait")
                        : calsim_error(NPURT_E_WAIT_TIMEOUT, "no terminal ticket after %llu ns",
                                       (unsigned long long)timeout_ns);
  calsim_unlock(d);
  if (status == NPURT_OK && which != NULL) *which = found;
  return status;
}

npurt_status npurt_job_result(npurt_device *handle, npurt_ticket ticket, npurt_completion *out) {
  npurt_status status = CALSIM_CHECK(out, npurt_completion);
  if (status != NPURT_OK) return status;
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  const calsim_job *job = calsim_job_of(d, ticket);
  npurt_completion completion = {0};
  if (job == NULL) {
    status = NPURT_E_STALE_TICKET;
  } else if (job->state < NPURT_JOB_DONE) {
    status =
        calsim_error(NPURT_E_NOT_READY, "job %llu is not terminal", (unsigned long long)ticket);
  } else {
    completion = (npurt_completion){
        .h.flags = job->flags,
        .ticket = job->ticket,
        .client_tag = job->client_tag,
        .generation = job->generation,
        .device_epoch = job->epoch,
        .status = job->status,
        .state = job->state,
        .engine_used = job->engine,
        .kv_effect = job->kv_effect,
        .lanes_done_mask = job->kv_effect == CALSIM_KV_UNKNOWN ? 0 : job->rows_done,
        .times = job->times,
        .ccu = job->ccu};
  }
  calsim_unlock(d);
  if (status == NPURT_OK) calsim_put(out, &completion, sizeof completion);
  return status;
}

static npurt_status check_cancel(const calsim_device *d, const calsim_job *job) {
  if (d->config.cancel == CALSIM_CANCEL_NONE)
    return calsim_error(NPURT_E_UNSUPPORTED, "this board cancels nothing");
  if (job->state == NPURT_JOB_QUEUED) return NPURT_OK;
  if (job->state < NPURT_JOB_DONE && d->config.cancel == CALSIM_CANCEL_ANY) return NPURT_OK;
  return calsim_error(NPURT_E_CANCEL_TOO_LATE, "job %llu has %s", (unsigned long long)job->ticket,
                      job->state < NPURT_JOB_DONE ? "begun" : "ended");
}

/* Not at work in a phase? What hangs for good is not ended by this either, nor on a sick device. */
static bool ends_at_once(const calsim_device *d, const calsim_job *job) {
  if (job->hung) return job->release_level != 0 && !calsim_is_sick(d);
  return job->state == NPURT_JOB_QUEUED || (!job->working && !job->over);
}

npurt_status npurt_job_cancel(npurt_device *handle, npurt_ticket ticket) {
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  calsim_job *job = calsim_job_of(d, ticket);
  npurt_status status = job == NULL ? NPURT_E_STALE_TICKET : check_cancel(d, job);
  if (job != NULL)
    calsim_trace(d, "cancel job=%llu code=0x%04x", (unsigned long long)job->ordinal,
                 (unsigned)status);
  if (status == NPURT_OK) {
    job->flags |= CALSIM_FLAG_CANCEL_SEEN;
    job->cancelled = true;
    if (ends_at_once(d, job)) {
      calsim_job_end(d, job, NPURT_JOB_ABORTED, NPURT_E_JOB_ABORTED,
                     job->state >= NPURT_JOB_EXEC ? CALSIM_KV_UNKNOWN : CALSIM_KV_NONE,
                     CALSIM_FLAG_QUIESCENT);
      calsim_engine_next(d);
    }
  }
  calsim_unlock(d);
  return status;
}

npurt_status npurt_job_retire(npurt_device *handle, npurt_ticket ticket) {
  calsim_device *d = calsim_lock(handle, CALSIM_DEVICE);
  if (d == NULL) return NPURT_E_BAD_HANDLE;
  calsim_job *job = calsim_job_of(d, ticket);
  npurt_status status = job == NULL ? NPURT_E_STALE_TICKET : NPURT_OK;
  const uint32_t settled = CALSIM_FLAG_TERMINAL | CALSIM_FLAG_QUIESCENT;
  if (job != NULL && (job->flags & settled) != settled)
    status =
        calsim_error(NPURT_E_OBJECT_IN_FLIGHT, "job %llu is %s", (unsigned long long)ticket,
                     job->state < NPURT_JOB_DONE ? "not terminal" : "terminal, but not quiescent");
  if (status == NPURT_OK) {
    uint32_t i = 0;
    while (d->jobs[i] != job) ++i;
    memmove(&d->jobs[i], &d->jobs[i + 1], (d->job_count - i - 1) * sizeof d->jobs[0]);
    --d->job_count;
    job->in->job = job->out->job = NULL;
    calsim_check_retire(d, job);
    calsim_retire_events(d, job);
    calsim_trace(d, "retire job=%llu", (unsigned long long)job->ordinal);
    pthread_cond_broadcast(&d->changed);
  }
  calsim_unlock(d);
  if (status == NPURT_OK) calsim_job_free(job);
  return status;
}
