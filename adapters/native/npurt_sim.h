/* npurt_sim.h - what only the simulated board can do: step its clock, inject faults, show what
 * happened inside.
 *
 * Opening. npurt_device_open takes lines of "key = value"; '#' begins a comment, unknown or
 * repeated keys are errors:
 *   profile       tiny (default): each phase takes 1 us, real forward
 *                 cost: real forward; times by the next four keys
 *                 null: 1 ns, no compute; logits follow from the last token and its position, KV
 *                 is not written
 *                 tp2-ref: memory and times of a 30B mixture of experts on two chips
 *                 tp2-b4, tp2-b8, tp2-b16: the same with a batch of at most that many and its
 *                 memory as 8 lanes of 5120, 16 of 2560 or 32 of 1280 tokens at most
 *   h2d, d2h      profile cost: time of the transfers of a job (50us)
 *   prefill       profile cost: A/B/C, EXEC takes A + B tokens + C tokens^2 (8ms/100us/0ns)
 *   decode        profile cost: A/B/C, EXEC takes A + B rows + C context tokens (8ms/500us/0ns)
 *   overlap       what of two jobs in flight overlaps, see Overlap (3)
 *   persona       file of a persona, see Personas
 *   seed          decides every draw (0)
 *   clock         manual (default), virtual: nothing moves but inside npurt_sim_step
 *                 real: an engine thread
 *   scale         real only: simulated time = elapsed time x scale (1)
 *   strict        0 | 1: the first violation ends the process (0)
 *   checks        all, none, or some of input, output and reuse joined by + (profile tiny: all,
 *                 else none); see Violations
 *   capture       0 | 1: keep float32 logits and routing of each job until it is retired (0)
 *   dram_bytes    per chip (17179869184)
 *   runtime_version, driver_version, firmware_version: dotted numbers (0.1.0)
 *   reset1 .. reset4, reset1_claims .. reset4_claims, reset_interval: see Resets
 *   board         file of a board that several processes have, see Owners
 *   cancel        which jobs npurt_job_cancel ends: none, queued (default), any: a running one ends
 *                 with its phase, ABORTED, in D2H as ever; a hung one at once, unless release=never
 *
 * Overlap. Two command banks, ping and pong, each with the tensors of one job. Phases begin in the
 * order of the submits, as soon as what they take is free; a job waits in the state that it has.
 *   0             nothing: a job begins when the one before has left its last phase
 *   1             the same; the capability says that commands are ready early, which costs nothing
 *                 here
 *   2             one link for both directions: the transfer to the device overlaps the other job's
 *                 EXEC, a transfer to the host overlaps nothing
 *   3             all three phases: a link each way, and what computes
 * One job computes at a time. npurt_device_set turns parallel mode off (then as 0) and on again,
 * with nothing in flight; it is on at open with overlap 2 and 3. With a real clock the phases of two
 * jobs run on two threads.
 *
 * Lane rules. Rows of a batch that are not active, and those that the job leaves out, write no lane
 * and have logits of zero, by every rule that lets them be.
 *   undefined     there are none: another batch than a full one is LANE_RULE
 *   length_zero   their tokens and length are 0
 *   mask_csr      as the register row_active says for each row, 1 where it is not given; a row of
 *                 which register and job differ is LANE_RULE. Their inputs are not looked at.
 *   scratch_lane  as length_zero; the row computes on a lane behind the bank's last
 * With "fixed_rows": true in its manifest a calbin takes row i of a job on lane i, or on lane i
 * behind a multiple of the batch; other rows are LANE_RULE.
 *
 * Personas. A text table that makes the board answer for its capabilities like another runtime; it
 * behaves as ever. '#' begins a comment; what is not understood is an error with its line:
 *   scope TEXT    of the lines below
 *   cap NAME support=yes|no|limited|unknown evidence=C0|..|C4
 *       source=device|vendor|header|record|inferred|simulated [value=N] [note=TEXT to the end]
 * on one line, each capability at most once. What it does not say is unknown, C3, inferred.
 *
 * Owners. With board=FILE all opens that name the file, in any process, are of one board: the file
 * says its epoch and who opened or reset it last, and is made where it is not there. An exclusive
 * open (flag EXCLUSIVE) is DEVICE_OWNED while anybody has the board, any open while one has it for
 * itself; a process that dies has it no more. A reset that begins a new epoch does so for all: at
 * its next call each other open loses its jobs, its configuration and its KV, with the events OWNER
 * and EPOCH, and what was built for the old epoch is STALE_EPOCH. Nothing else is shared.
 *
 * But for that every open is a board of its own, always "board 0"; boards of one process share nothing but the
 * numbering of tickets, generations and handles.
 *
 * Device memory. One memory file per chip. A configured calbin lives in the file of the lowest chip
 * of its mask, in pages: for ping, then for pong, tokens, positions, lengths, logits, kv_digest;
 * then the KV of lane 0, lane 1, ... (float32, layout in calsim_model.h; npurt_sim_kv_address says
 * where). H2D and D2H are kernel copies between host memory and that file, in pieces of 64 KiB.
 * They happen within their phase, never at submit; with a stepped clock at the end of the phase.
 *
 * Violations. Mistakes of the host are events of kind VIOLATION with the ticket they are about, a
 * list (npurt_sim_violations), and the end of the process with strict = 1. The text begins with
 * what it is, then names the tensor:
 *   RANGE_OVERLAP     memory was mapped or submitted that a job in flight transfers, one as output
 *   HOST_MEMORY_GONE  a transfer found no memory; the job fails with DMA
 *   COMMIT_UNWRITTEN  KV was committed that no job has written
 *   INPUT_TOUCHED     (input) what was transferred is not what was there at submit; it is used
 *   OUTPUT_TOUCHED    (output) output memory was written before the device wrote it
 *   NOT_RESTORED      (reuse) a buffer is submitted again without buffer_restore(1 | 2)
 *   INPUT_NOT_WIPED   (reuse) tokens of the buffer's latest job lie where this one has none
 *   TAG_LEFT          (reuse) at retire: a valid output holds some of the tag
 * With check output, an accepted submit fills the output memory with the job's tag, undefined BF16
 * numbers that carry the ticket: who reads too early reads those. A board would not do that.
 *
 * Resets. What a level does, and what npurt_reset_describe says that it does, are two lists, so that
 * a test may set them apart:
 *   reset1 .. reset4                words joined by +, or none: the effects that the level has
 *   reset1_claims .. reset4_claims  the same; a word with ? behind it is unknown, one that is not
 *                                   there is denied
 *   reset_interval                  least time between two resets of level 4 (1s)
 * The words are the effects NPURT_FX_* in small letters. By default the levels do:
 *   1  aborts_jobs+quiesces_dma+drops_kv+drops_all_kv+other_chip+other_model; of KV the claims say
 *      that it is unknown
 *   2  drops_config+drops_all_configs+drops_kv+drops_all_kv+drops_params+other_model
 *   3  frees_dynamic
 *   4  what 1 and 2 do, clears_sticky+frees_dynamic+frees_all+resets_counters+new_epoch; the claims
 *      say of reloads_firmware that it is unknown
 * Levels 2 and 3 want nothing in flight, or level 1 before them; level 3 wants no calbin configured.
 *   aborts_jobs    jobs end ABORTED; without it they go on, and with drops_config they are LOST
 *   quiesces_dma   what has ended is QUIESCENT; without it, it is not, and may still write
 *   drops_kv       every lane is unknown and waits for its RELEASE; without it only those of jobs
 *                  that were cut off
 *   drops_config   the calbin is LOST, its generation stale, its memory given back but for dynamic
 *   frees_dynamic  dynamic memory that no calbin holds, and leaks that end with it
 *   frees_all      leaks that end with a device reset
 *   clears_sticky  of level 4 only: the other levels end what a fault says that they end
 *   drops_host_maps  buffers that no job holds are mapped no more
 *   reloads_firmware the device tells its own versions again
 *   other_chip     without it levels 1 and 2 leave a calbin alone that is on none of the chips asked
 * The effects without a line here are words for the report. Buffers of a generation that is gone can
 * be destroyed once their job is retired, those of a job that is never quiescent can not: they, the
 * bank and the handle of the calbin stay until the device is closed; that calbin, or another handle
 * of it, can be configured anew all the same.
 *
 * Fault plan. One rule a line; the first rule that fires at a point wins; what is not understood is
 * an error with its line:
 *   fault ID kind=KIND [on=POINT] [nth=N | every=N | p=X] [count=N|inf] [skip=N]
 *         [task=prefill|decode] [engine=ping|pong] [model=NAME] [lane=N] [after=T] [until=T]
 *         [inflight>=N] [level=1..4] [during=load] [keys of the kind]
 *   kind                  on               keys of the kind
 *   submit_reject         submit           code=0x601 (any of class 1 to 3, 0x601, 0x603)
 *   submit_indeterminate  submit           runs=yes|no; no: queued for ever, until cancel or reset
 *   csr_fail              submit           k=0: the register of which the setter fails
 *   ccu_exception         exec             chip=0 code=1 pc=0 quiesce=y|n kv=none|partial|unknown
 *   hang                  h2d, exec, d2h   phase= (the same as on=) release=never|reset1|..|reset4
 *   slow                  h2d, exec, d2h   factor=X phase=exec: the phase takes X times as long
 *   dma_error             h2d, d2h         dir= (the same as on=) offset=0: bytes moved before it
 *   numeric_nan           exec             lanes=all (or a mask) flag=y|n: with NUMERIC_FLAG or not
 *   numeric_garbage       exec             lanes=all flag=n|y: finite numbers, none of them right
 *   numeric_constant      exec             lanes=all flag=n|y: every logit is 1
 *   numeric_offset        exec             lanes=all flag=n|y n=1: of token T are those of T - n
 *   stale_output          exec             logits of the job before on that bank
 *   swapped_output        d2h              what lies in the other bank as output
 *   kv_stale              exec             pos=: the row stays what it was before the job
 *   kv_swap               exec             pos= with=LANE: the row exchanged with that lane's
 *   kv_zero, kv_bit       exec             pos=: the row is zero; one bit of it is another
 *   pad_write             exec             victim=LANE: an inactive row writes over its first row
 *   unhealthy             h2d, exec, d2h,  chip=0 release=reset1: health says so, jobs go on
 *                         submit, health,
 *                         time
 *   sticky                the same         code=0x804 release=reset4: every submit fails with it
 *   wedged                the same         release=reset4: and all jobs in flight hang
 *   device_lost           the same         release=reset4: and all jobs in flight are LOST
 *   thermal               exec             tau=10s rise=50 limit=80 factor=2: one RC node, degrees
 *   drift                 exec             percent= of EXEC per 10^6 jobs, bytes= of memory per job
 *   illegal_step          poll             from=STATE to=STATE: a poll shows another state
 *   lost_completion       visible          poll_sees=y|n: polls see it and no wait does, or nobody
 *   late_completion       visible          delay=T: told that much later, with event and flag LATE;
 *                                          outlives=n|y: also after a reset, even of a retired job
 *   late_dma              visible          delay=T bytes=64: writes the job's tag to its logits
 *   kv_apply_before       kv_apply_before  code=0x703 (0x304, 0x703, 0x704) partial=n|y
 *   kv_apply_after        kv_apply_after   the same
 *   kv_can_lie            kv_can           tokens=N, with or without sign: pool, lanes look larger
 *   counter_skew          counters         field=NAME n=N, with or without sign: added when read
 *   counter_stuck         counters         field=NAME: shows what it did at the first firing
 *   counter_negative      counters         field=NAME n=1: shows 0 - n
 *   counter_reset         counters         field=NAME: counts from the first firing on
 *   configure_fail        configure        code=0x701 (any of class 3, 7, 8): nothing is taken
 *   configure_partial_memory configure     bytes=104857600 chip=0 release=reset3|reset4|never: it
 *                                          fails with 0x701 and so much is taken
 *   configure_hang        configure        for=T heeds=y|n: takes so long, at most its timeout, then
 *                                          0x701; without for= always that; heeds=n: no timeout
 *   warmup_wrong          configure        every logit of that configuration is 1
 *   release_leak          release          bytes=104857600 chip=0: not given back any more
 *   leak_until_dynamic_clear, leak_until_soft  release  the same, until reset 3, until reset 4
 *   release_slow          release          for=T: everything is given back only then
 *   reset_fail            reset            code=0x805 (any of class 8): nothing is done
 *   reset_refused         reset            0x806, nothing is done
 *   reset_slow            reset            for=T: takes so long; 0x805 and nothing done when the
 *                                          caller's timeout is over before that
 *   reset_ok_but_dead     reset            then=lost|hang|garbage release=reset4: all is done, then
 *                                          the device is lost, or every job hangs, or has garbage;
 *                                          tells=n|y: OK and verified, or 0x807
 *   reset_partial         reset            without=EFFECTS: these are not had; tells=n|y: are they in
 *                                          the report? Jobs, QUIESCED and memory never lie
 *   reset_wide            reset            also=EFFECTS: these are had too; tells=y|n
 *   health_block          health           for=T: the call takes so long
 *   memory_skew           memory           field=NAME n=N, with or without sign: added when read
 *   version_mismatch      reset, time      field=runtime|driver|firmware version=N.N: told from then
 *   epoch_bump            submit, health,  another process resets the board: jobs, configuration and
 *                         time             KV are gone, epoch and events say so
 *   owner_change          the same         pid=1 for=T: and has it until then (for ever): submits,
 *                                          configurations and resets are DEVICE_OWNED
 * Points. submit: every submit that would be accepted. configure: every configuration that could be.
 * release: of a configured calbin. reset: every reset that may run. health, memory: every look. time:
 * once, at after=, which it needs. visible: a job's end becomes known; lost and
 * late_completion take only jobs that are DONE, late_dma only ends without QUIESCENT, and a reset
 * that makes the job quiescent stops it. kv_apply_before: a list that would be applied and
 * reserves; kv_apply_after: one that commits, rolls back or releases, decided first where a list
 * does both. partial=y has code 0x704 and leaves every lane of the list unknown. The points of KV
 * know no job, so task= and engine= are refused there, configure and release no lane either, and
 * the others but those of jobs no model; level= is for resets.
 * The occurrences of a point that pass a rule's filters are its matches. skip drops the first ones;
 * then nth takes the N-th, every each N-th, p each with probability X by hash(seed, ID, point,
 * ordinal of the point); without any of the three every match fires. count bounds the firings: by
 * default inf for every, p, thermal, drift, counter_stuck and counter_reset, else 1. Times carry a
 * unit (ns us ms s) and are device time.
 * Rules are armed, and their ordinals begin, at npurt_sim_arm; during=load arms a rule at once, and
 * so are those of configure, release, reset, health, memory and time.
 * A call that takes time lets a stepped clock jump; with a real one it sleeps, and others go on.
 * KV rows are those of all layers at pos, by default the last position that the job writes, on the
 * lane that lane= names or the first active one. The job's own logits are right; what reads the row
 * later is not. pad_write matches jobs with an inactive row only. Without a thermal rule the chips
 * have 45 or 52 degrees. release=never ends with the board; a reset of another level leaves it.
 * A hang released by resetN ends like any other job in a reset of level N or above. never means
 * that no reset ends it; a device reset (level 4) gives the job up as LOST, not quiescent. */
#ifndef NPURT_SIM_H
#define NPURT_SIM_H
#include "npurt.h"
#ifdef CALSIM_PLAIN /* a build without these entries: a library like any other */
#undef NPURT_API
#define NPURT_API
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* npurt_sim_step: how */
enum {
  NPURT_SIM_STEP_ONE = 1, /* one event */
  NPURT_SIM_STEP_TIME,    /* every event up to device time `arg`; the clock ends there */
  NPURT_SIM_STEP_TICKET,  /* until a ticket reaches a state: arg = NPURT_SIM_REACH(ticket, state) */
  NPURT_SIM_STEP_IDLE,    /* until no event is left */
  NPURT_SIM_STEP_KIND,    /* up to and including the next event of kind `arg` */
  NPURT_SIM_STEP_END      /* up to device time `arg` or the first event that ends a job; the clock
                             stays at the last event */
};
#define NPURT_SIM_REACH(ticket, state) \
  ((uint64_t)(ticket) | ((uint64_t)(state) << 56)) /* any terminal state counts as 5 */

/* Kinds of events. */
enum {
  NPURT_SIM_EVENT_START = 1,
  NPURT_SIM_EVENT_H2D_END,
  NPURT_SIM_EVENT_EXEC_END,
  NPURT_SIM_EVENT_D2H_END,
  NPURT_SIM_EVENT_LATE_END,  /* a completion that was held back */
  NPURT_SIM_EVENT_LATE_WRITE, /* a transfer after the job's end */
  NPURT_SIM_EVENT_FAULT       /* the instant of a rule on=time */
};

/* npurt_sim_clock: op */
enum {
  NPURT_SIM_CLOCK_READ = 1, /* out: now */
  NPURT_SIM_CLOCK_NEXT,     /* out: time of the next event, UINT64_MAX if there is none */
  NPURT_SIM_CLOCK_SCALE     /* real clock only: value = scale in thousandths; out: now */
};

/* Fire events; `fired` (may be NULL) says how many. NOT_READY when a ticket's state was not reached
 * (TICKET) or no such event came (KIND) before the events ran out. BAD_STATE with the real clock.
 */
NPURT_API npurt_status npurt_sim_step(npurt_device *d, uint32_t how, uint64_t arg, uint32_t *fired);
NPURT_API npurt_status npurt_sim_clock(npurt_device *d, uint32_t op, uint64_t value, uint64_t *out);

/* Replace the fault plan (NULL or empty: no faults). All or nothing. */
NPURT_API npurt_status npurt_sim_faults(npurt_device *d, const char *plan);
/* Arm the plan, now and for plans to come; call it when the first model is published. Again: no
 * effect. */
NPURT_API npurt_status npurt_sim_arm(npurt_device *d);

/* The description of this board; npurt_device_describe(0) gives that of the board opened last. */
NPURT_API npurt_status npurt_sim_describe(npurt_device *d, npurt_device_desc *out);
/* Everything that happened, one event a line, in text that names no address and no process-wide
 * number. `need` (may be NULL): bytes with the final NUL; buf may be NULL when cap is 0. Cut to
 * cap. */
NPURT_API npurt_status npurt_sim_trace(npurt_device *d, char *buf, uint64_t cap, uint64_t *need);
/* Host mistakes seen so far, oldest first. inout_n: room before, number of violations after. */
NPURT_API npurt_status npurt_sim_violations(npurt_device *d, npurt_event *arr, uint32_t stride,
                                            uint32_t *inout_n);

/* Recompute n tokens of a calbin folder from nothing, without any board: logits after the last one
 * [vocab], KV digest. Either may be NULL. */
NPURT_API npurt_status npurt_sim_oracle(const char *calbin_path, const int32_t *tokens, uint32_t n,
                                        uint16_t *logits_bf16, uint64_t *kv_digest);

/* With capture=1, of a job that ran, until it is retired. `pos` counts the job's own tokens of that
 * row from 0. Logits: cap floats of room, at least the vocabulary; routing: cap entries in each, at
 * least experts_per_token. */
NPURT_API npurt_status npurt_sim_logits(npurt_device *d, npurt_ticket t, uint32_t row, uint32_t pos,
                                        float *out, uint64_t cap);
NPURT_API npurt_status npurt_sim_routing(npurt_device *d, npurt_ticket t, uint32_t row,
                                         uint32_t pos, uint32_t layer, int32_t *idx, float *w,
                                         uint32_t cap);

/* Digest of a lane's committed KV; where the lane's KV lies in device memory. */
NPURT_API npurt_status npurt_sim_kv_digest(npurt_kvbank *k, uint32_t lane, uint64_t *out);
NPURT_API npurt_status npurt_sim_kv_address(npurt_kvbank *k, uint32_t lane, uint32_t *chip,
                                            uint64_t *addr, uint64_t *bytes);
/* Read and write device memory. */
NPURT_API npurt_status npurt_sim_peek(npurt_device *d, uint32_t chip, uint64_t addr, void *buf,
                                      uint64_t len);
NPURT_API npurt_status npurt_sim_poke(npurt_device *d, uint32_t chip, uint64_t addr,
                                      const void *buf, uint64_t len);

#ifdef __cplusplus
}
#endif
#endif
