# A value of Redis', with a connection for every thread.
require "json"
require "redis"

run lambda { |request|
  cache = Thread.current[:cache] ||= Redis.new(host: "127.0.0.1", port: @redis@)
  number = request["PATH_INFO"][/\d+/]
  seen = cache.incr("seen:#{number}")
  [200, { "content-type" => "application/json" }, [JSON.generate(number: number, seen: seen)]]
}
