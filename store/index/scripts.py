"""Lua scripts that Redis runs atomically for a shared index.

Keys of one namespace share a hash tag. Keys that are not written for `KEEP_MS` expire; times are by Redis's clock.
"""

from __future__ import annotations

KEEP_MS = 24 * 3600 * 1000
"""Keys of an unused namespace expire after this time."""

ACQUIRE = """
-- KEYS: leases in order; ARGV: milliseconds, holder. How many were free, up to the first that was not.
for number, key in ipairs(KEYS) do
  if not redis.call('SET', key, ARGV[2], 'NX', 'PX', ARGV[1]) then
    return number - 1
  end
end
return #KEYS
"""

RELEASE = """
-- KEYS: a lease; ARGV: its holder.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
"""

NOTIFY = f"""
-- KEYS: generation, stream; ARGV: a generation if there is none, origin, changes to keep, then kind, variant and record
-- of each change. Every entry names the one before it, so that a reader sees that something is missing.
redis.call('SET', KEYS[1], ARGV[1], 'NX')
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local before = newest and newest[1] or '0-0'
for at = 4, #ARGV, 3 do
  before = redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'before', before, 'origin', ARGV[2],
                      'kind', ARGV[at], 'id', ARGV[at + 1], 'record', ARGV[at + 2])
end
redis.call('PEXPIRE', KEYS[1], {KEEP_MS})
redis.call('PEXPIRE', KEYS[2], {KEEP_MS})
"""

CHANGES = f"""
-- KEYS: generation, stream; ARGV: a generation if there is none, origin, generation and id of the cursor ('' for none),
-- most entries. Generation, id to go on from, whether nothing is missing, then kind, variant and record of each change
-- of others.
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', {KEEP_MS}) then
  redis.call('DEL', KEYS[2])
end
local generation = redis.call('GET', KEYS[1])
local found = {{}}
if generation == ARGV[3] then
  found = redis.call('XRANGE', KEYS[2], '(' .. ARGV[4], '+', 'COUNT', ARGV[5])
  if found[1] and found[1][2][2] == ARGV[4] then
    local reply = {{generation, found[#found][1], 1}}
    for _, entry in ipairs(found) do
      local fields = entry[2]
      if fields[4] ~= ARGV[2] then
        table.insert(reply, fields[6])
        table.insert(reply, fields[8])
        table.insert(reply, fields[10])
      end
    end
    return reply
  end
end
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local last = newest and newest[1] or '0-0'
local is_complete = generation == ARGV[3] and last == ARGV[4]
return {{generation, last, is_complete and 1 or 0}}
"""

_ORDERS = """
-- KEYS: values, numbers, attempts (hashes by order), expiry, free, taken (sorted by time, number, time), next number.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function remove(key)
  for at = 1, 3 do redis.call('HDEL', KEYS[at], key) end
  for at = 4, 6 do redis.call('ZREM', KEYS[at], key) end
end
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now)) do
  remove(key)
end
"""

PLACE = (
    _ORDERS
    + f"""
-- ARGV: order, value, milliseconds, most orders. Whether it is new.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then
  return 0
end
local number = redis.call('INCR', KEYS[7])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], number)
redis.call('ZADD', KEYS[4], now + ARGV[3], ARGV[1])
redis.call('ZADD', KEYS[5], number, ARGV[1])
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[4]) then
  local oldest = redis.call('ZRANGE', KEYS[5], 0, 0)[1]
  remove(oldest)
end
for at = 1, 7 do redis.call('PEXPIRE', KEYS[at], {KEEP_MS} + ARGV[3]) end
return 1
"""
)

TAKE = (
    _ORDERS
    + """
-- ARGV: milliseconds. Order, value and attempt of the oldest that is not taken.
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', now)) do
  redis.call('ZREM', KEYS[6], key)
  redis.call('ZADD', KEYS[5], redis.call('HGET', KEYS[2], key), key)
end
local key = redis.call('ZRANGE', KEYS[5], 0, 0)[1]
if not key then
  return false
end
redis.call('ZREM', KEYS[5], key)
redis.call('ZADD', KEYS[6], now + ARGV[1], key)
local attempt = redis.call('HINCRBY', KEYS[3], key, 1)
for _, at in ipairs({3, 5, 6}) do redis.call('PEXPIRE', KEYS[at], redis.call('PTTL', KEYS[1])) end
return {key, redis.call('HGET', KEYS[1], key), attempt}
"""
)

FINISH = _ORDERS + "\n-- ARGV: order.\nremove(ARGV[1])\n"

COUNT = _ORDERS + "\nreturn redis.call('HLEN', KEYS[1])\n"
