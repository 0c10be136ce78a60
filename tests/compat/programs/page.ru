# A page that counts in Redis, for Puma: says `METHOD QUERY LENGTH DIGEST` of what it was sent.

# Loaded now: threads that load it at the same time see half of it.
require 'digest/md5'
require 'redis'

# A thread of Puma's may keep its connection, as a pool would.
def redis
  Thread.current[:redis] ||= Redis.new(host: '127.0.0.1', port: Integer(ENV.fetch('REDIS_PORT')), timeout: 30)
end

run(lambda do |env|
  body = env['rack.input'].read
  method, query = env.values_at('REQUEST_METHOD', 'QUERY_STRING')
  redis.set("last.#{query}", body)
  said = "#{method} #{query} #{body.bytesize} #{Digest::MD5.hexdigest(redis.get("last.#{query}"))}\n"
  [200, { 'content-type' => 'text/plain' }, [said, "line\n" * (body.bytesize % 7000)]]
end)
