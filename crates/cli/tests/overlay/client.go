// A client of the server: many connections, some at a time, each with a name and bytes of its own. It says "ok" and how many, if every
// connection had the peer and the bytes that it should; else what was wrong. With a pause it keeps each open and uses it again afterwards.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"
)

func content(seed, count int) []byte {
	state := uint64(seed)*2 + 1
	made := make([]byte, count)
	for at := range made {
		state = state*6364136223846793005 + 1442695040888963407
		made[at] = byte(state >> 33)
	}
	return made
}

func exchange(connection net.Conn, reader *bufio.Reader, name string, sent []byte) error {
	errors := make(chan error, 1)
	go func() {
		_, err := connection.Write(append([]byte(fmt.Sprintf("%s %d\n", name, len(sent))), sent...))
		errors <- err
	}()
	line, err := reader.ReadString('\n')
	if err != nil {
		return err
	}
	wanted := fmt.Sprintf("%s %s %s\n", name, connection.RemoteAddr(), connection.LocalAddr())
	if line != wanted {
		return fmt.Errorf("the server says %q, not %q", line, wanted)
	}
	received := make([]byte, len(sent))
	if _, err := io.ReadFull(reader, received); err != nil {
		return err
	}
	if !bytes.Equal(received, sent) {
		return fmt.Errorf("%s: other bytes came back", name)
	}
	return <-errors
}

func converse(address string, number, count int, pause time.Duration) error {
	connection, err := net.DialTimeout("tcp", address, 20*time.Second)
	if err != nil {
		return err
	}
	defer connection.Close()
	connection.SetDeadline(time.Now().Add(60 * time.Second))
	if connection.RemoteAddr().String() != address {
		return fmt.Errorf("the peer of %s is %s", address, connection.RemoteAddr())
	}
	reader := bufio.NewReader(connection)
	name := fmt.Sprintf("c%d", number)
	if err := exchange(connection, reader, name, content(number, count)); err != nil {
		return err
	}
	if pause == 0 {
		return nil
	}
	fmt.Println("paused")
	time.Sleep(pause)
	return exchange(connection, reader, name, content(number+1, count))
}

func main() {
	address := os.Args[1]
	var numbers [4]int
	for at := range numbers {
		numbers[at], _ = strconv.Atoi(os.Args[2+at])
	}
	connections, atATime, count, pause := numbers[0], numbers[1], numbers[2], time.Duration(numbers[3])*time.Millisecond
	next, done := make(chan int), make(chan error)
	for range atATime {
		go func() {
			for number := range next {
				done <- converse(address, number, count, pause)
			}
		}()
	}
	go func() {
		for number := range connections {
			next <- number
		}
	}()
	for range connections {
		if err := <-done; err != nil {
			fmt.Println("wrong:", err)
			os.Exit(1)
		}
	}
	fmt.Println("ok", connections)
}
