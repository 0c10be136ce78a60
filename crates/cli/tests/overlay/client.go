// A client of the server. It makes many connections, some concurrently, each with its own name and
// bytes.
//
// It prints "ok" and the number of connections, if each had the right peer and bytes. Otherwise it
// prints the error. With a pause, it keeps each connection open and uses it again afterwards.
//
// With "tides", it makes its connections to several servers in turn and reports that. When a file
// for the next step exists, it uses each connection again, closes all, and reports that. Then it
// starts again.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
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

func await(path string) {
	for {
		if _, err := os.Stat(path); err == nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func tide(directory, name string, addresses []string, count, tide int) error {
	connections := make([]net.Conn, count)
	readers := make([]*bufio.Reader, count)
	// Only two at a time, because there are hundreds of clients.
	each := func(work func(at int) error) error {
		done, places := make(chan error, count), make(chan bool, 2)
		for at := range count {
			go func() {
				places <- true
				done <- work(at)
				<-places
			}()
		}
		var wrong error
		for range count {
			if err := <-done; err != nil {
				wrong = err
			}
		}
		return wrong
	}
	use := func(at, seed int) error {
		return exchange(connections[at], readers[at], fmt.Sprintf("%s-%d-%d", name, tide, at), content(seed+at, 500))
	}
	err := each(func(at int) (err error) {
		connections[at], err = net.DialTimeout("tcp", addresses[at%len(addresses)], 60*time.Second)
		if err != nil {
			return err
		}
		readers[at] = bufio.NewReader(connections[at])
		return use(at, 1000*tide)
	})
	if err != nil {
		return err
	}
	fmt.Println("up", tide)
	await(fmt.Sprintf("%s/ebb-%d", directory, tide))
	if err := each(func(at int) error { return use(at, 1000*tide+500) }); err != nil {
		return err
	}
	for _, connection := range connections {
		connection.Close()
	}
	fmt.Println("down", tide)
	return nil
}

func tides() {
	directory, name, addresses := os.Args[2], os.Args[3], strings.Split(os.Args[4], ",")
	count, _ := strconv.Atoi(os.Args[5])
	for number := 0; ; number++ {
		await(fmt.Sprintf("%s/rise-%d", directory, number))
		if err := tide(directory, name, addresses, count, number); err != nil {
			fmt.Println("wrong:", err)
			os.Exit(1)
		}
	}
}

func main() {
	if os.Args[1] == "tides" {
		tides()
	}
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
