"""The views of a journal file of schema version 1, which is read and continued as it is.

There an event is ``[machine, entities, trigger, source, dest, epoch, generation, data?]``.
"""

EVENT = """\
CREATE VIEW event (step, ordinal, at_ns, machine, entities, "trigger", source, dest, epoch,
  generation, data) AS
SELECT
  s.step,
  e.key,
  s.at_ns,
  e.value ->> 0,
  (
    SELECT group_concat(
      (e.value ->> 0) || '/' || CASE n.type
        WHEN 'array' THEN (n.value ->> 0) || '-' || (n.value ->> 1)
        ELSE n.value
      END,
      ', '
    )
    FROM json_each(e.value, '$[1]') AS n
  ),
  e.value ->> 2,
  e.value ->> 3,
  e.value ->> 4,
  e.value ->> 5,
  e.value ->> 6,
  e.value -> 7
FROM step AS s, json_each(s.events) AS e"""

ENTITY_EVENT = """\
CREATE VIEW entity_event (step, ordinal, at_ns, machine, entity, "trigger", source, dest, epoch,
  generation) AS
SELECT
  s.step,
  e.key,
  s.at_ns,
  e.value ->> 0,
  (e.value ->> 0) || '/' || (
    CASE n.type WHEN 'array' THEN n.value ->> 0 ELSE n.value END + one.key
  ),
  e.value ->> 2,
  e.value ->> 3,
  e.value ->> 4,
  e.value ->> 5,
  e.value ->> 6
FROM
  step AS s,
  json_each(s.events) AS e,
  json_each(e.value, '$[1]') AS n,
  json_each(
    '[0' || CASE n.type
      WHEN 'array' THEN replace(hex(zeroblob((n.value ->> 1) - (n.value ->> 0))), '00', ',0')
      ELSE ''
    END || ']'
  ) AS one"""
"""The last join counts: a range of n entities is made to an array of n zeros, whose keys count."""
