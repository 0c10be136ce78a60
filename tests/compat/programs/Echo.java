import java.io.BufferedOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.util.Arrays;
import java.util.Iterator;
import java.util.Random;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.zip.CRC32;

/**
 * An echo server and a verifying client: plain sockets with streams and a thread each, or NIO
 * channels with one selector.
 *
 *     Echo server streams|nio PORT
 *     Echo client streams|nio PORT CONNECTIONS MESSAGES
 *
 * A message is a 4-byte big-endian length and that many bytes, and is echoed unchanged. The client
 * compares, and prints one checksum over all connections, which depends on its arguments only. The
 * environment variable ECHO_HOST replaces the address 127.0.0.1.
 */
public class Echo {
    /** Milliseconds that a connection stays open after its last message, so that the status shows it. */
    static final int HOLD = 500;
    static final String HOST = System.getenv().getOrDefault("ECHO_HOST", "127.0.0.1");
    static final int LARGEST = 200_000;

    public static void main(String[] arguments) throws Exception {
        boolean nio = arguments[1].equals("nio");
        int port = Integer.parseInt(arguments[2]);
        if (arguments[0].equals("server")) {
            if (nio) serveNio(port); else serveStreams(port);
            return;
        }
        int connections = Integer.parseInt(arguments[3]);
        int count = Integer.parseInt(arguments[4]);
        System.out.println(nio ? clientNio(port, connections, count) : clientStreams(port, connections, count));
    }

    static int size(Random source) {
        int kind = source.nextInt(100);
        return 1 + source.nextInt(kind < 90 ? 2000 : kind < 99 ? 20_000 : LARGEST - 1);
    }

    static byte[] message(Random source) {
        byte[] message = new byte[size(source)];
        source.nextBytes(message);
        return message;
    }

    static void serveStreams(int port) throws Exception {
        try (ServerSocket listener = new ServerSocket(port, 128, InetAddress.getByName(HOST))) {
            while (true) {
                Socket socket = listener.accept();
                Thread thread = new Thread(() -> serveStream(socket));
                thread.setDaemon(true);
                thread.start();
            }
        }
    }

    static void serveStream(Socket socket) {
        try (socket) {
            socket.setTcpNoDelay(true);
            DataInputStream input = new DataInputStream(socket.getInputStream());
            DataOutputStream output = new DataOutputStream(new BufferedOutputStream(socket.getOutputStream(), 65536));
            while (true) {
                byte[] message = new byte[input.readInt()];
                input.readFully(message);
                output.writeInt(message.length);
                output.write(message);
                output.flush();
            }
        } catch (java.io.EOFException end) {
            // The client has closed the connection.
        } catch (Exception error) {
            error.printStackTrace();
        }
    }

    static long clientStreams(int port, int connections, int count) throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(connections);
        Future<?>[] results = new Future<?>[connections];
        for (int index = 0; index < connections; index++) {
            int connection = index;
            results[index] = pool.submit(() -> clientStream(port, connection, count));
        }
        CRC32 all = new CRC32();
        for (Future<?> result : results) {
            add(all, (Long) result.get());
        }
        pool.shutdown();
        return all.getValue();
    }

    static Long clientStream(int port, int connection, int count) throws Exception {
        Random source = new Random(connection);
        CRC32 sum = new CRC32();
        try (Socket socket = new Socket(HOST, port)) {
            socket.setTcpNoDelay(true);
            DataInputStream input = new DataInputStream(socket.getInputStream());
            DataOutputStream output = new DataOutputStream(new BufferedOutputStream(socket.getOutputStream(), 65536));
            for (int turn = 0; turn < count; turn++) {
                byte[] message = message(source);
                output.writeInt(message.length);
                output.write(message);
                output.flush();
                byte[] answer = new byte[input.readInt()];
                input.readFully(answer);
                if (!Arrays.equals(message, answer)) {
                    throw new IllegalStateException("connection " + connection + ": other bytes came back");
                }
                sum.update(answer);
            }
            Thread.sleep(HOLD);
        }
        return sum.getValue();
    }

    /** The bytes that a channel must still write, in order. */
    static final class Pending {
        ByteBuffer buffer = ByteBuffer.allocate(2 * LARGEST + 64);
    }

    static void serveNio(int port) throws Exception {
        Selector selector = Selector.open();
        ServerSocketChannel listener = ServerSocketChannel.open();
        listener.bind(new InetSocketAddress(HOST, port), 128);
        listener.configureBlocking(false);
        listener.register(selector, SelectionKey.OP_ACCEPT);
        while (true) {
            selector.select();
            Iterator<SelectionKey> keys = selector.selectedKeys().iterator();
            while (keys.hasNext()) {
                SelectionKey key = keys.next();
                keys.remove();
                if (key.isAcceptable()) {
                    SocketChannel channel = listener.accept();
                    channel.configureBlocking(false);
                    channel.register(selector, SelectionKey.OP_READ, new Pending());
                } else {
                    serveChannel(key);
                }
            }
        }
    }

    /** Reads while there is room, writes as much as possible, and selects the next events. */
    static void serveChannel(SelectionKey key) throws Exception {
        SocketChannel channel = (SocketChannel) key.channel();
        ByteBuffer buffer = ((Pending) key.attachment()).buffer;
        int got = buffer.hasRemaining() ? channel.read(buffer) : 0;
        buffer.flip();
        channel.write(buffer);
        buffer.compact();
        if (got < 0 && buffer.position() == 0) {
            channel.close();
            return;
        }
        int wanted = buffer.position() > 0 ? SelectionKey.OP_WRITE : 0;
        key.interestOps(wanted | (buffer.hasRemaining() ? SelectionKey.OP_READ : 0));
    }

    /** One NIO connection of the client, with one message at a time in progress. */
    static final class Conversation {
        final int connection;
        final int count;
        final Random source;
        final CRC32 sum = new CRC32();
        byte[] message;
        ByteBuffer output;
        ByteBuffer input;
        int turn;

        Conversation(int connection, int count) {
            this.connection = connection;
            this.count = count;
            this.source = new Random(connection);
        }

        /** Prepares the next message, if there is one. */
        boolean next() {
            if (turn == count) return false;
            turn++;
            message = message(source);
            output = ByteBuffer.allocate(message.length + 4);
            output.putInt(message.length).put(message).flip();
            input = ByteBuffer.allocate(message.length + 4);
            return true;
        }

        /** Returns true if the answer is complete. It must equal the message. */
        boolean answered() {
            if (input.hasRemaining()) return false;
            input.flip();
            byte[] answer = new byte[message.length];
            if (input.getInt() != message.length || !input.get(answer).equals(input) || !Arrays.equals(message, answer)) {
                throw new IllegalStateException("connection " + connection + ": other bytes came back");
            }
            sum.update(answer);
            return true;
        }
    }

    static long clientNio(int port, int connections, int count) throws Exception {
        Selector selector = Selector.open();
        Conversation[] all = new Conversation[connections];
        SocketChannel[] channels = new SocketChannel[connections];
        for (int index = 0; index < connections; index++) {
            all[index] = new Conversation(index, count);
            channels[index] = SocketChannel.open();
            channels[index].configureBlocking(false);
            channels[index].connect(new InetSocketAddress(HOST, port));
            channels[index].register(selector, SelectionKey.OP_CONNECT, all[index]);
        }
        int running = connections;
        while (running > 0) {
            selector.select();
            Iterator<SelectionKey> keys = selector.selectedKeys().iterator();
            while (keys.hasNext()) {
                SelectionKey key = keys.next();
                keys.remove();
                if (!converse(key)) {
                    key.interestOps(0);
                    running--;
                }
            }
        }
        Thread.sleep(HOLD);
        CRC32 sum = new CRC32();
        for (int index = 0; index < connections; index++) {
            channels[index].close();
            add(sum, all[index].sum.getValue());
        }
        return sum.getValue();
    }

    /** Makes one step of a conversation; returns false when it is over. */
    static boolean converse(SelectionKey key) throws Exception {
        SocketChannel channel = (SocketChannel) key.channel();
        Conversation conversation = (Conversation) key.attachment();
        if (key.isConnectable()) {
            channel.finishConnect();
            if (!conversation.next()) return false;
        }
        channel.write(conversation.output);
        if (channel.read(conversation.input) < 0) {
            throw new java.io.EOFException("connection " + conversation.connection + " ended early");
        }
        if (conversation.answered()) {
            if (!conversation.next()) return false;
            channel.write(conversation.output);
        }
        boolean more = conversation.output.hasRemaining();
        key.interestOps(more ? SelectionKey.OP_READ | SelectionKey.OP_WRITE : SelectionKey.OP_READ);
        return true;
    }

    static void add(CRC32 sum, long value) {
        sum.update(ByteBuffer.allocate(8).putLong(value).array());
    }
}
