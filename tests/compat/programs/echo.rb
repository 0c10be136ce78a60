# An echo server in Ruby: echo.rb select|threads|async|eventmachine PORT

require 'socket'

def echo(stream)
  while (data = stream.readpartial(65536))
    stream.write(data)
  end
rescue EOFError, Errno::ECONNRESET
  stream.close
end

# One thread, which waits in IO.select for all of them.
def serve_by_select(port)
  listener = TCPServer.new('127.0.0.1', port)
  waiting = Hash.new { |hash, stream| hash[stream] = +'' }
  streams = []
  loop do
    writers = waiting.keys
    readable, writable = IO.select([listener, *streams - writers], writers)
    readable.each do |stream|
      next streams << listener.accept if stream == listener

      data = stream.read_nonblock(65536, exception: false)
      next if data == :wait_readable

      data ? waiting[stream] << data : streams.delete(stream).close
    end
    writable.each do |stream|
      count = stream.write_nonblock(waiting[stream], exception: false)
      next if count == :wait_writable

      waiting[stream] = waiting[stream].byteslice(count..)
      waiting.delete(stream) if waiting[stream].empty?
    end
  end
end

def serve_by_threads(port)
  listener = TCPServer.new('127.0.0.1', port)
  loop { Thread.new(listener.accept) { |stream| echo(stream) } }
end

def serve_by_async(port)
  require 'async/io'
  require 'async/io/stream'
  Async do
    Async::IO::Endpoint.tcp('127.0.0.1', port).accept do |socket|
      stream = Async::IO::Stream.new(socket)
      while (data = stream.read_partial(65536))
        stream.write(data)
        stream.flush
      end
    end
  end
end

def serve_by_eventmachine(port)
  require 'eventmachine'
  handler = Module.new { def receive_data(data) = send_data(data) }
  EventMachine.epoll
  EventMachine.run { EventMachine.start_server('127.0.0.1', port, handler) }
end

style, port = ARGV
send("serve_by_#{style}", Integer(port))
