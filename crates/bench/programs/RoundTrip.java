// Round trips with blocking channels: `serve ADDRESS SIZE` or `load ADDRESS SIZE SECONDS`. ADDRESS
// is HOST:PORT or the path of a Unix socket. It speaks the protocol of the bench's synthetic loads.

import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.net.StandardProtocolFamily;
import java.net.StandardSocketOptions;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.util.Arrays;
import java.util.Locale;

final class RoundTrip {
    private static final double WARM = 1.0;

    public static void main(String[] arguments) throws Exception {
        SocketAddress address = parse(arguments[1]);
        int size = Integer.parseInt(arguments[2]);
        if (arguments[0].equals("serve")) {
            serve(address, size);
        } else {
            load(address, size, Double.parseDouble(arguments[3]));
        }
    }

    private static SocketAddress parse(String text) {
        if (text.contains("/")) {
            return UnixDomainSocketAddress.of(text);
        }
        int colon = text.lastIndexOf(':');
        return new InetSocketAddress(text.substring(0, colon), Integer.parseInt(text.substring(colon + 1)));
    }

    private static void serve(SocketAddress address, int size) throws IOException {
        boolean unix = address instanceof UnixDomainSocketAddress;
        ServerSocketChannel server = unix ? ServerSocketChannel.open(StandardProtocolFamily.UNIX) : ServerSocketChannel.open();
        server.bind(address);
        if (unix) {
            System.out.println("ready " + address);
        } else {
            InetSocketAddress bound = (InetSocketAddress) server.getLocalAddress();
            System.out.println("ready 127.0.0.1:" + bound.getPort());
        }
        Thread acceptor = new Thread(() -> accept(server, size, unix));
        acceptor.setDaemon(true);
        acceptor.start();
        untilInputEnds();
    }

    private static void accept(ServerSocketChannel server, int size, boolean unix) {
        try {
            while (true) {
                SocketChannel channel = server.accept();
                if (!unix) {
                    channel.setOption(StandardSocketOptions.TCP_NODELAY, true);
                }
                Thread one = new Thread(() -> echo(channel, size));
                one.setDaemon(true);
                one.start();
            }
        } catch (IOException ended) {
            // The process is about to end.
        }
    }

    private static void echo(SocketChannel channel, int size) {
        ByteBuffer buffer = ByteBuffer.allocateDirect(size);
        try {
            while (exchange(channel, buffer)) {
                buffer.flip();
                while (buffer.hasRemaining()) {
                    channel.write(buffer);
                }
                buffer.clear();
            }
        } catch (IOException ended) {
            // The client has closed too.
        }
    }

    /** Fills the buffer; false at the end of the stream. */
    private static boolean exchange(SocketChannel channel, ByteBuffer buffer) throws IOException {
        while (buffer.hasRemaining()) {
            if (channel.read(buffer) < 0) {
                return false;
            }
        }
        return true;
    }

    private static void load(SocketAddress address, int size, double seconds) throws IOException {
        SocketChannel channel = SocketChannel.open(address);
        if (!(address instanceof UnixDomainSocketAddress)) {
            channel.setOption(StandardSocketOptions.TCP_NODELAY, true);
        }
        ByteBuffer buffer = ByteBuffer.allocateDirect(size);
        run(channel, buffer, WARM);
        System.out.println("begin");
        long begin = System.nanoTime();
        long[] latencies = run(channel, buffer, seconds);
        double elapsed = (System.nanoTime() - begin) / 1e9;
        Arrays.sort(latencies);
        System.out.println(String.format(
                Locale.ROOT,
                "{\"operations\":%d,\"seconds\":%f,\"p50_us\":%f,\"p99_us\":%f}",
                latencies.length,
                elapsed,
                latencies[latencies.length / 2] / 1e3,
                latencies[(int) (latencies.length * 0.99)] / 1e3));
        untilInputEnds();
    }

    private static long[] run(SocketChannel channel, ByteBuffer buffer, double seconds) throws IOException {
        long[] latencies = new long[1 << 16];
        int count = 0;
        long before = System.nanoTime();
        long end = before + (long) (seconds * 1e9);
        while (before < end) {
            buffer.clear();
            while (buffer.hasRemaining()) {
                channel.write(buffer);
            }
            buffer.clear();
            if (!exchange(channel, buffer)) {
                throw new IOException("the server closed the connection");
            }
            long now = System.nanoTime();
            if (count == latencies.length) {
                latencies = Arrays.copyOf(latencies, 2 * count);
            }
            latencies[count++] = now - before;
            before = now;
        }
        return Arrays.copyOf(latencies, count);
    }

    private static void untilInputEnds() throws IOException {
        while (System.in.read() >= 0) {
            // The input is never used.
        }
        System.exit(0);
    }
}
