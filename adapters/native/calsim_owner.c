/* calsim_owner.c - whose board it is, and how it describes itself now. */
#include "calsim_internal.h"
#include <unistd.h>

/* Has another process the board? Gives it back when its time is over. */
static bool is_foreign(calsim_device *d) {
  if (d->foreign_pid == 0) return false;
  if (calsim_now(d) < d->foreign_until_ns) return true;
  d->foreign_pid = 0;
  calsim_event(d, NPURT_EV_OWNER, 0, 0, NPURT_OK, "given back");
  return false;
}

npurt_status calsim_check_owner(calsim_device *d) {
  if (!is_foreign(d)) return NPURT_OK;
  return calsim_error(NPURT_E_DEVICE_OWNED, "process %u has the board", d->foreign_pid);
}

void calsim_take_away(calsim_device *d, const calsim_rule *rule) {
  uint64_t now = calsim_now(d);
  d->foreign_pid = rule->pid;
  d->foreign_until_ns = rule->for_ns > UINT64_MAX - now ? UINT64_MAX : now + rule->for_ns;
  calsim_foreign_reset(d, rule->pid);
}

void calsim_describe_now(calsim_device *d, npurt_device_desc *out) {
  calsim_describe(&d->config, out);
  out->owner_known = 1;
  out->owner_pid = is_foreign(d)        ? d->foreign_pid
                   : d->shared_fd >= 0 ? d->shared_owner
                                        : (uint32_t)getpid();
  char *const told[] = {out->runtime_version, out->driver_version, out->firmware_version};
  if (d->told_field != 0)
    calsim_copy_text(told[d->told_field - 1], sizeof out->runtime_version, d->told_version);
}
